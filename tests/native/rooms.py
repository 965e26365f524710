"""What to compile of `adasum_hvd/native`, room by room, with the flags of the injected CMake."""

from __future__ import annotations

import platform
from pathlib import Path

from adasum_hvd.install.sources import NATIVE

X86 = platform.machine() == "x86_64"
_X86_FLAGS = {
    "kernels/avx2.cc": ("-mavx2", "-mfma", "-mf16c"),
    "kernels/avx512.cc": (
        "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq",
        "-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512",
    ),
}  # fmt: skip


def sources(*parts: str) -> dict[Path, tuple[str, ...]]:
    """Return the sources to compile, each with flags of its own.

    Args:
        parts: folders, without those in them, or files, below `adasum_hvd/native`.
    """
    found: list[Path] = []
    for part in parts:
        path = NATIVE / part
        found += sorted(path.glob("*.c[cu]")) if path.is_dir() else [path]
    flags = {NATIVE / name: own for name, own in _X86_FLAGS.items()}
    return {path: flags.get(path, ()) for path in found if X86 or path not in flags}
