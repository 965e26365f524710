"""The sources of a build: Horovod's from PyPI, ours, and the folder that keeps both.

The cache directory is `$ADASUM_HVD_CACHE`, else `$XDG_CACHE_HOME/adasum_hvd`, else
`~/.cache/adasum_hvd`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from adasum_hvd.horovod.build.environment import BuildError
from adasum_hvd.horovod.launch.supervisor import running

HOROVOD_VERSION = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# The core needs nothing of Horovod; what is here needs both. They form one tree of includes.
NATIVE = Path(__file__).parents[1]
CORE = NATIVE.parent / "core"
INCLUDES = (f"-I{CORE}", f"-I{NATIVE}")  # the compiler's flags


def cache_dir() -> Path:
    """Return the directory that holds wheels and build trees."""
    if chosen := os.environ.get("ADASUM_HVD_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "adasum_hvd"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory against other processes."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def native_files() -> dict[str, Path]:
    """Return the native sources of this installation, by their names in the tree of includes."""
    suffixes = (".h", ".cc", ".cu", ".inc", ".cmake")
    found = [(p, root) for root in (CORE, NATIVE) for p in root.rglob("*")]
    named = {str(p.relative_to(r)): p for p, r in found if p.suffix in suffixes}
    return dict(sorted(named.items()))


def native_key() -> str:
    """Return a hash over the native sources of this installation."""
    digest = hashlib.sha256()
    for name, path in native_files().items():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def sync_native(target: Path) -> None:
    """Copy the native sources to `target`; an unchanged file keeps its time."""
    keep = set()
    for name, source in native_files().items():
        copy = target / name
        keep.add(copy)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
    for stale in [p for p in target.rglob("*") if p.is_file() and p not in keep]:
        stale.unlink()


def run_pip(expected: str, remedy: str, arguments: Sequence[str]) -> None:
    """Run pip; if it fails, raise BuildError with `expected`, its last error and `remedy`."""
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    with running(
        command, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        _, shown = process.communicate()
    if process.returncode:
        lines = shown.strip().splitlines() or [f"status {process.returncode}"]
        errors = [line for line in lines if line.lower().startswith("error")]
        raise BuildError(f"{expected}, but got: {(errors or lines)[-1]}; {remedy}")
    sys.stderr.write(shown)


def _fetch_sdist(directory: Path) -> Path:
    """Download Horovod's sdist with pip, which unpacks it only if its hash is right."""
    archive = directory / f"horovod-{HOROVOD_VERSION}.tar.gz"
    if not archive.exists():
        requirements = directory / "horovod.txt"
        requirements.write_text(
            f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n"
        )
        run_pip(
            f"{archive.name}: expected a download",
            f"check the network and `pip config list`, or put the file into {directory}",
            [
                *("download", "--no-deps", "--no-binary", ":all:"),
                *("--no-build-isolation", "--dest", str(directory)),
                *("--require-hashes", "--requirement", str(requirements)),
            ],
        )
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != HOROVOD_SHA256:
        archive.unlink()
        raise BuildError(
            f"Horovod's sdist: expected sha256 {HOROVOD_SHA256}, but got {found}; "
            "the download was deleted, run the build again"
        )
    return archive


def source_tree(root: Path) -> Path:
    """Return the folder of Horovod's sources in `root`; download and extract them if needed."""
    tree = root / f"horovod-{HOROVOD_VERSION}"
    if (tree / "setup.py").exists():
        return tree
    with locked(cache_dir()):
        if not (tree / "setup.py").exists():
            _extract(_fetch_sdist(cache_dir()), tree)
    return tree


def _extract(sdist: Path, tree: Path) -> None:
    """Extract to another folder, then rename it: an interrupted extraction leaves no tree."""
    partial = tree.with_name("partial")
    for folder in (tree, partial):
        shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        # Older releases of Python have no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(partial)
    (partial / tree.name).rename(tree)
    partial.rmdir()
