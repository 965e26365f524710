"""The first error that users meet: an import before `adasum-hvd build`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import horovod
import pytest

from adasum_hvd.horovod.preflight import library_path

REPOSITORY = Path(__file__).parents[2]
SITE = Path(horovod.__file__).parents[1]
IMPORT = """
import sys
site, project, packages, framework = sys.argv[1:]
sys.meta_path = [f for f in sys.meta_path if "editable" not in str(f).lower()]
sys.path = [project, packages, *(p for p in sys.path if p != site)]
try:
    __import__("adasum_hvd." + framework)
except ImportError as error:
    print(error)
else:
    print("imported")
"""


def packages_without(tmp_path: Path, *names: str) -> Path:
    """Return a folder with all installed packages except these.

    It lies as deep in a folder of libraries as the real one: Horovod's library finds MPI by
    its place relative to itself.
    """
    libraries = SITE.parents[1]
    folder = tmp_path / SITE.relative_to(libraries.parent)
    folder.mkdir(parents=True)
    for entry in libraries.iterdir():
        if entry != SITE.parent:
            (tmp_path / libraries.name / entry.name).symlink_to(entry)
    for entry in SITE.iterdir():
        if entry.name.partition("-")[0] not in names and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def copy_of_horovod(folder: Path) -> Path:
    """Copy Horovod without its libraries, and return the copy's folder."""
    for source in (*SITE.glob("horovod/**/*.py"), SITE / "horovod/metadata.json"):
        target = folder / source.relative_to(SITE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
    return folder / "horovod"


def imported(packages: Path, framework: str) -> str:
    """Return the error of `import adasum_hvd.<framework>` with only `packages` installed."""
    words = [sys.executable, "-c", IMPORT, SITE, REPOSITORY, packages, framework]
    shown = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=True, cwd=packages
    )
    return shown.stdout.splitlines()[-1]


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_no_horovod(tmp_path: Path, framework: str) -> None:
    message = imported(packages_without(tmp_path, "horovod"), framework)
    assert message.startswith(
        f"adasum_hvd.{framework}: expected a Horovod built with the"
    )
    assert "got none; run `adasum-hvd build`" in message


def test_no_framework(tmp_path: Path) -> None:
    message = imported(packages_without(tmp_path, "torch"), "torch")
    assert "got none; run `pip install torch`, then `adasum-hvd build`" in message


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_horovod_without_the_framework(tmp_path: Path, framework: str) -> None:
    packages = packages_without(tmp_path, "horovod")
    copy_of_horovod(packages)
    message = imported(packages, framework)
    assert (
        f"got one that was built without {framework}; run `adasum-hvd build`" in message
    )


def test_horovod_without_the_op(tmp_path: Path) -> None:
    packages = packages_without(tmp_path, "horovod")
    library = library_path("torch")
    copy = copy_of_horovod(packages) / library.relative_to(SITE / "horovod")
    # As PyPI's: nothing of that name is exported.
    there, gone = b"horovod_adasum_version", b"horovod_nothing_so_far"
    copy.write_bytes(library.read_bytes().replace(there, gone))
    message = imported(packages, "torch")
    assert message.partition(", but got ")[2].startswith(
        f"{copy} without the op; run `adasum"
    )


def test_horovod_that_does_not_load(tmp_path: Path) -> None:
    packages = packages_without(tmp_path, "horovod")
    library = library_path("torch")
    copy = copy_of_horovod(packages) / library.relative_to(SITE / "horovod")
    copy.write_bytes(b"of another machine")
    message = imported(packages, "torch")
    assert "got one that does not load (" in message
    assert "run `adasum-hvd build`" in message


def test_keras_on_a_backend_that_is_missing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    shown = imported(packages_without(tmp_path, "jax"), "tensorflow")
    assert "Keras does not load (No module named 'jax'; KERAS_BACKEND=jax)" in shown
    assert "; set KERAS_BACKEND=tensorflow" in shown
