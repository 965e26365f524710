"""The wheel and the sdist can build the op from an empty folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import adasum_hvd
from adasum_hvd.horovod.build.sources import NATIVE, native_files
from tests.parallel.harness.imported import run_script

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Build the wheel and the sdist of a copy of the repository."""
    directory = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in tracked:
        if (REPOSITORY / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((REPOSITORY / name).read_bytes())
    (source / "build").mkdir()
    for compiled in ("adasum_hvd/core", "build/core"):  # `make wheel` compiles it again
        shutil.rmtree(source / compiled, ignore_errors=True)
        (source / compiled).symlink_to(REPOSITORY / compiled)
    build = (
        "import setuptools.build_meta as b; b.build_sdist({0!r}); b.build_wheel({0!r})"
    )
    subprocess.run(
        [sys.executable, "-c", build.format(str(directory))],
        cwd=source, check=True, capture_output=True,
    )  # fmt: skip
    return directory


def test_both_hold_the_native_sources(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)  # of any Python
    assert "adasum_hvd/core/libadasum.so" in in_wheel
    for path in native_files().values():
        name = str(path.relative_to(NATIVE.parents[1]))
        assert name in in_wheel
        assert name in in_sdist
    assert "LICENSE" in in_sdist


def test_the_version_is_the_same_everywhere() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    native = (NATIVE / "op" / "settings.h").read_text()
    assert re.search(r'^version = "(.*)"', project, re.M)[1] == adasum_hvd.__version__
    assert re.search(r'kVersion\[\] = "(.*)"', native)[1] == adasum_hvd.__version__


def test_the_table_of_versions_is_what_ci_installs() -> None:
    table = (REPOSITORY / "docs/compatibility.md").read_text()
    rows = [line for line in table.splitlines() if "| Open MPI 5" in line]
    files = [
        REPOSITORY / f".github/versions/{n}.txt" for n in ("oldest", "middle", "newest")
    ]
    for row, path in zip(rows, [REPOSITORY / "pyproject.toml", *files], strict=True):
        for name in ("torch", "tensorflow-cpu", "keras"):
            version = re.search(rf'^ *"?{name}==([0-9.]+)', path.read_text(), re.M)[1]
            assert f"| {version} |" in row, (path.name, name)


def test_extras_allow_what_ci_tests_and_nothing_older() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    oldest = (REPOSITORY / ".github/versions/oldest.txt").read_text()
    for framework in ("torch", "tensorflow"):
        extra = re.search(rf'^{framework} = \["([^"]+)"', project, re.M)[1]
        (minimum,) = Requirement(extra).specifier
        tested = re.search(rf"^{framework}(?:-cpu)?==(\S+)", oldest, re.M)[1]
        assert minimum.operator == ">="
        assert tested.split(".")[:2] == minimum.version.split(".")[:2]


NAMES = """
import importlib, json, sys
print(json.dumps({
    name: [sorted(importlib.import_module(name).__all__), dir(importlib.import_module(name))]
    for name in sys.argv[1:]
}))
"""
PUBLIC = [
    f"adasum_hvd.{name}"
    for name in (
        "boost", "distributed", "learning_rate", "monitor.statistics", "ops", "parallel",
        "reference", "torch", "torch.ddp",
        "mindspore_checkpoint", "torch.elastic", "tensorflow", "tensorflow.elastic",
        "tensorflow.keras",
        "tensorflow.keras.callbacks", "tensorflow.keras.elastic",
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def names() -> dict[str, tuple[list[str], list[str]]]:
    """Return `__all__` and `dir()` of every public module."""
    return json.loads(run_script(NAMES, *PUBLIC).splitlines()[-1])


def test_public_names_are_the_listed_names(names) -> None:
    for module, (listed, there) in names.items():
        assert set(listed) <= set(there) and len(listed) == len(set(listed)), module
        assert not {"os", "tf", "torch", "keras", "warnings", "version"} & set(listed)
    for module in ("torch", "tensorflow", "tensorflow.keras"):
        listed, there = names[f"adasum_hvd.{module}"]
        assert not {"os", "tf", "warnings", "version"} & set(there), module
        assert {"init", "rank", "DistributedOptimizer", "check_replicas"} <= set(listed)


def test_every_public_name_is_in_the_reference(names) -> None:
    sections = (REPOSITORY / "docs/api.md").read_text().split("\n## ")
    by_module = {
        re.search(r"`(adasum_hvd[\w.]*)`", text)[1]: text for text in sections[1:]
    }
    assert by_module.keys() == set(PUBLIC)
    for module, (listed, _) in names.items():
        for name in set(listed) - {"elastic", "callbacks"}:
            found = rf"^::: adasum_hvd[\w.]*\.{name}$|`{name}`"
            assert re.search(found, by_module[module], re.M), (module, name)


def test_all_public_names_of_horovod_exist(names) -> None:
    """Horovod's functions and classes; `__all__` has the names that its modules define."""
    for framework in ("torch", "tensorflow"):
        listed = set(names[f"adasum_hvd.{framework}"][0])
        expected = {
            "allgather",
            "alltoall",
            "broadcast_object",
            "ProcessSet",
            "add_process_set",
        }
        assert (
            expected | {"SyncBatchNorm" if framework == "torch" else "Compression"}
            <= listed
        )
