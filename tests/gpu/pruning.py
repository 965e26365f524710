"""Zero the parts of a library that are for other devices or debuggers, so that it compresses."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_FAT_BINARIES = (".nv_fatbin", "__nv_relfatbin")
_CONTAINER, _CUBIN = 0xBA55ED50, 2


def sections(image: bytes | bytearray) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and bytes of every section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [
        struct.unpack_from("<II4Q", image, table + size * k) for k in range(count)
    ]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        yield image[start : image.index(0, start)].decode(), offset, length


def prune(image: bytearray, architecture: int) -> int:
    """Zero code for other architectures in a library's fat binaries, and debug information.

    A fat binary is a row of containers of entries. An entry has 16-bit kind and version, and 32-bit
    length of the header and 64-bit length of what follows; its architecture is at byte 28.

    Returns:
        How many entries are left.
    """
    kept = 0
    for name, place, length in sections(image):
        if name.startswith(".debug"):
            image[place : place + length] = bytes(length)
        if name not in _FAT_BINARIES:
            continue
        end = place + length
        while place < end - 16:
            magic, _, header, size = struct.unpack_from("<IHHQ", image, place)
            if magic != _CONTAINER:
                place += 8  # padding
                continue
            entry, place = place + header, place + header + size
            while entry < place:
                kind, _, header, size = struct.unpack_from("<HHIQ", image, entry)
                (device,) = struct.unpack_from("<I", image, entry + 28)
                if (kind, device) == (_CUBIN, architecture):
                    kept += 1
                else:
                    image[entry + header : entry + header + size] = bytes(size)
                entry += header + size
    return kept
