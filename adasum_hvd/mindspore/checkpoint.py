"""MindSpore's checkpoint files (`save_checkpoint`, format "ckpt"), read without MindSpore.

A file is one message of protobuf. Its field 1 repeats, an entry for each tensor: the name (1) and
the tensor (2), which is dimensions (1), the name of the dtype (2) and the bytes in C order (3).
Large tensors have several entries of one name, each with a part of the bytes. With `crc_check`
the file ends in "crc_num" and the CRC-32 of all bytes before, a big-endian number of 10 bytes.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Buffer = bytes | memoryview

_PART_BYTES = 512 << 20  # MindSpore's; protobuf ends at 2 GiB
_CRC, _CRC_DIGITS = b"crc_num", 10
# NumPy's dtypes, except bfloat16, which it lacks.
DTYPES = {
    f"{prefix}{bits}": f"{prefix.lower()}{bits}"
    for prefix in ("Int", "UInt", "Float")
    for bits in (8, 16, 32, 64)
    if (prefix, bits) != ("Float", 8)
} | {"Bool": "bool", "BFloat16": "uint16"}


class Entry(NamedTuple):
    """A tensor of a checkpoint, or a text (dtype "str").

    Fields: `name`, of the parameter; `dtype`, MindSpore's, such as "Float32"; `shape`, () for a
    single number; `data`, the bytes in C order, little-endian.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    def array(self) -> np.ndarray:
        """Return the values as an array, bfloat16 as float32; ValueError for an unknown dtype."""
        if self.dtype == "str":
            return np.array(bytes(self.data).decode("utf-32-le"))
        array = np.frombuffer(self.data, self.known_dtype()).reshape(self.shape)
        if self.dtype == "BFloat16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array

    def known_dtype(self) -> str:
        """Return NumPy's name of the dtype, or uint16 for bfloat16; ValueError for others."""
        if self.dtype not in DTYPES:
            raise ValueError(
                f"MindSpore checkpoint: {self.name}: expected one of {', '.join(DTYPES)}, but got "
                f"dtype {self.dtype!r}; convert the parameter in MindSpore, and save it again"
            )
        return DTYPES[self.dtype]


def read(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """Return the entries of a file by name, in the file's order.

    Args:
        path: a file that MindSpore's `save_checkpoint` or :func:`write` wrote.

    Raises:
        ValueError: the file is cut or damaged, or not a checkpoint (encrypted, or of another
            format).
        NotImplementedError: it has a parameter of MindSpore's hash tables.
        OSError: it cannot be read.
    """
    content = memoryview(Path(path).read_bytes())
    if bytes(content[:1]) != b"\x0a":
        raise ValueError(
            f"MindSpore checkpoint {path}: expected a file of save_checkpoint, but got one that "
            f"starts with {bytes(content[:8])!r}; save it without enc_key, in the format ckpt"
        )
    tail = len(_CRC) + _CRC_DIGITS
    if content[-tail:-_CRC_DIGITS] == _CRC:
        crc = int.from_bytes(content[-_CRC_DIGITS:], "big")
        content = content[:-tail]
        if zlib.crc32(content) != crc:
            raise _damaged(path, "a checksum that fits", "another one")
    parts: dict[str, list[Entry]] = {}
    try:
        for value in _message(content)[1]:
            entry = _entry(value)
            parts.setdefault(entry.name, []).append(entry)
    except (LookupError, TypeError, UnicodeDecodeError):
        raise _damaged(path, "whole entries", "other bytes") from None
    return {name: _joined(path, entries) for name, entries in parts.items()}


def write(path: str | os.PathLike[str], entries: Iterable[Entry]) -> None:
    """Write entries, in order, to a file that MindSpore's `load_checkpoint` reads.

    It replaces the old file when it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    partial = Path(f"{os.fspath(path)}.tmp")
    with partial.open("wb") as file:
        for entry in entries:
            dimensions = b"".join(b"\x08" + _number(size) for size in entry.shape)
            head = _field(1, entry.name.encode())
            kind = dimensions + _field(2, entry.dtype.encode())
            for start in range(0, len(entry.data), _PART_BYTES):
                part = _field(3, entry.data[start : start + _PART_BYTES])
                file.write(_field(1, head + _field(2, kind + part)))
    partial.replace(path)


def _damaged(path: Any, expected: str, got: str) -> ValueError:
    return ValueError(
        f"MindSpore checkpoint {path}: expected {expected}, but got {got}: the file is cut or "
        "damaged; copy it again"
    )


def _entry(content: memoryview) -> Entry:
    fields = _message(content)
    name = str(fields[1][0], "utf-8")
    if 2 not in fields and 3 in fields:
        raise NotImplementedError(
            f"MindSpore checkpoint: {name}: expected a tensor, but got a hash table; leave "
            "this MapParameter out with choice_func of save_checkpoint"
        )
    tensor = _message(fields[2][0])
    shape = tuple(map(index, tensor.get(1, ())))
    return Entry(name, str(tensor[2][0], "utf-8"), shape, memoryview(tensor[3][0]))


def _joined(path: Any, parts: list[Entry]) -> Entry:
    """Return one entry from the parts of a tensor, with all of its bytes."""
    entry = first = parts[0]
    if len(parts) > 1:
        entry = first._replace(data=b"".join(part.data for part in parts))
    if entry.dtype not in DTYPES:
        return entry
    item = np.dtype(DTYPES[entry.dtype]).itemsize
    if entry.shape == (0,) and len(entry.data) == item:  # of releases before 2.10
        entry = entry._replace(shape=())
    expected = math.prod(entry.shape) * item
    same = all(part[:3] == first[:3] for part in parts)
    if not same or len(entry.data) != expected:
        what = f"{expected} bytes of {entry.dtype} for {entry.name} {entry.shape}"
        got = f"{len(entry.data)}" if same else "parts of different shapes"
        raise _damaged(path, what, got)
    return entry


# ---- the encoding of protobuf ----


def _message(content: memoryview) -> dict[int, list[Any]]:
    """Return the values of a message by field: numbers, or bytes. LookupError if it is none."""
    fields: dict[int, list[Any]] = {}
    at = 0
    while at < len(content):
        key, at = _read_number(content, at)
        number, at = _read_number(content, at)
        value: int | memoryview = number
        if key & 7 == 2:
            value = content[at : at + number]
            at += number
        if key & 7 not in (0, 2) or at > len(content):
            raise LookupError
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _read_number(content: memoryview, at: int) -> tuple[int, int]:
    """Return the number at a position and the position after it: 7 bits a byte, lowest first."""
    value = shift = 0
    while True:
        value |= (content[at] & 0x7F) << shift
        if content[at] < 0x80 or shift > 63:
            return value, at + 1
        at, shift = at + 1, shift + 7


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _field(number: int, content: Buffer) -> bytes:
    return b"".join((_number(number << 3 | 2), _number(len(content)), content))
