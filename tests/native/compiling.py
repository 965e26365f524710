"""Compile native sources once: objects stay in the cache folder, by what they are made of."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adasum_hvd.horovod.build import prerequisites
from adasum_hvd.horovod.build.sources import CORE, NATIVE, cache_dir

_REPOSITORY = Path(__file__).parents[2]
_TESTS = _REPOSITORY / "tests" / "native"
_FOLDERS = (CORE, NATIVE, _TESTS, _TESTS / "simulated_cuda")  # of headers
_INCLUDE = re.compile(r"""^#include ["<]([^">]+)[">]""", re.MULTILINE)
_AT_ONCE = threading.Semaphore(
    len(os.sched_getaffinity(0))
)  # compilers, of all callers
_KEPT_SECONDS = 14 * 24 * 3600  # since it was last used


def objects(
    sources: Mapping[Path, Sequence[str]], flags: Sequence[str], room: str
) -> list[Path]:
    """Compile what has changed since the last call, and return one object per source.

    Args:
        sources: with flags of their own.
        flags: of all sources.
        room: folder in the cache folder.

    Raises:
        subprocess.CalledProcessError: a source does not compile.
    """
    compiler = str(prerequisites.compiler())

    def compile_one(source: Path) -> Path:
        own = sources[source]
        command = [compiler, *flags, *own, "-x", "c++", "-c", str(source)]
        return _made(command, _read_by(source, own), room, source.stem, ".o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def linked(
    compiled: Iterable[Path], flags: Sequence[str], libraries: Sequence[str], room: str,
    name: str,
) -> Path:  # fmt: skip
    """Link objects to the program or library `name`, unless that is there, and return it.

    Raises:
        subprocess.CalledProcessError: the objects do not link.
    """
    inputs = [str(path) for path in compiled]
    command = [str(prerequisites.compiler()), *flags, *inputs, *libraries]
    return _made(command, [], room, *os.path.splitext(name))


def _read_by(source: Path, flags: Sequence[str]) -> list[Path]:
    """Return a source, and what it includes of the op's and the tests' files."""
    found = [source, *(Path(flag) for flag in flags if Path(flag).is_file())]
    for path in found:  # which grows
        for name in _INCLUDE.findall(path.read_text(errors="replace")):
            places = (folder / name for folder in _FOLDERS)
            found += [
                place for place in places if place.is_file() and place not in found
            ]
    return found


def _made(
    command: list[str], read: Iterable[Path], room: str, stem: str, suffix: str
) -> Path:
    """Return what the command makes of what it reads, made now or earlier."""
    directory = cache_dir() / room
    # The same in every clone, and in every environment with the wheel.
    words = "\0".join(command).replace(str(NATIVE.parent), "adasum_hvd")
    words = words.replace(f"{_REPOSITORY}/", "")
    key = hashlib.sha256(words.encode())
    for path in read:
        key.update(path.read_bytes())
    target = directory / f"{stem}-{key.hexdigest()[:16]}{suffix}"
    if target.exists():
        os.utime(target)
    else:
        _forget_unused(directory)
        with _AT_ONCE, tempfile.TemporaryDirectory(dir=directory) as folder:
            made = Path(folder, target.name)
            subprocess.run([*command, "-o", str(made)], check=True)
            made.rename(target)
    return target


def _forget_unused(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.is_file() and time.time() - path.stat().st_mtime > _KEPT_SECONDS:
            path.unlink(missing_ok=True)
