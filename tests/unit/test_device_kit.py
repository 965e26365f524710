"""A kit for a machine with devices, without what takes minutes to compile, on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from adasum_hvd.horovod.build import nccl
from tests.gpu import kit
from tests.gpu.pruning import prune, sections
from tests.gpu.steps import steps

REPOSITORY = Path(__file__).parents[2]
PYTHON = ".".join(map(str, sys.version_info[:2]))
NO_NETWORK = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net"]
INFORMATION = "Metadata-Version: 2.1\nName: adasum-hvd\nVersion: 0\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_kit(folder: Path, python: str = PYTHON) -> Path:
    """Make a kit without Horovod, with the checkout's package and stand-ins for binaries."""
    wheel, information = (
        folder / "adasum_hvd-0",
        folder / "adasum_hvd-0" / "adasum_hvd-0.dist-info",
    )
    shutil.copytree(REPOSITORY / "adasum_hvd", wheel / "adasum_hvd")
    information.mkdir()
    (information / "METADATA").write_text(INFORMATION)
    (information / "WHEEL").write_text(WHEEL)
    made = folder / "kit"
    (made / "wheels").mkdir(parents=True)
    pack = [sys.executable, "-m", "wheel", "pack", "--dest-dir", str(made / "wheels")]
    subprocess.run([*pack, str(wheel)], check=True, capture_output=True)
    library = "adasum_hvd/core/libadasum.so"  # loads on any machine
    for name, files in {
        "project": {"tests/__init__.py": "", "tests/gpu": ""},
        "programs": {"LICENSE": ""},
        "nccl": {library: "nvidia/nccl/lib/libnccl.so.2"},
    }.items():
        with tarfile.open(made / f"{name}.tar.xz", "w:xz") as archive:
            for file, other in files.items():
                archive.add(REPOSITORY / file, other or file)
    shutil.copy(REPOSITORY / "tests" / "gpu" / "unpack.py", made / "run.py")
    kit.describe(made, {"python": python, "architecture": "90"})
    return made


def run(made: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a kit from elsewhere, in a network namespace without a route."""
    if subprocess.run(
        [*NO_NETWORK, "true"], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs a network namespace: root or user namespaces")
    elsewhere = folder / "temporary"
    elsewhere.mkdir()
    words = [*NO_NETWORK, sys.executable, str(made / "run.py")]
    return subprocess.run(
        [*words, "--minutes", "1", "--output", "found"],
        cwd=folder, env=os.environ | {"TMPDIR": str(elsewhere)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_it_runs_to_its_end_without_a_network(tmp_path):
    shown = run(make_kit(tmp_path), tmp_path)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    found = json.loads((tmp_path / "found" / "results.json").read_text())
    expected = [
        "set-up",
        *(s.name for s in steps({"versions": {"architecture": "90"}})),
    ]
    assert [row["name"] for row in found["steps"]] == expected
    assert len(shown.stdout.splitlines()) == len(expected) + 1
    set_up, loads, *others = found["steps"]
    assert set_up["became"] == "ok"
    assert loads["became"] in ("ok", "skipped")  # of this environment's Horovod
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        assert {row["became"] for row in others} == {"skipped"}
    assert list((tmp_path / "temporary").iterdir()) == []
    assert "Error" not in shown.stderr  # of loading NCCL as Python starts


def test_a_kit_for_another_python_reports_every_step(tmp_path):
    shown = run(make_kit(tmp_path, "2.7"), tmp_path)
    assert shown.returncode == 1
    first, *_, last = shown.stdout.splitlines()
    assert f"set-up: expected Python 2.7, but got {PYTHON}" in first
    assert last.split(", ")[1] == "1 failed"
    assert (
        len(json.loads((tmp_path / "found" / "results.json").read_text())["steps"]) > 10
    )


def test_a_torn_copy_is_refused(tmp_path):
    made = make_kit(tmp_path)
    archive = made / "programs.tar.xz"
    archive.write_bytes(archive.read_bytes()[:-1])
    shown = run(made, tmp_path)
    assert shown.returncode == 1
    assert "programs.tar.xz: expected sha256" in shown.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_kit_that_is_too_large_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(11))
    monkeypatch.setattr(kit, "LIMIT", 10)
    with pytest.raises(RuntimeError, match="expected at most 10 bytes, but got 11"):
        kit.describe(tmp_path, {})


def test_pruning_zeroes_other_devices_code_only(tmp_path):
    """Of a real library for two architectures."""
    try:
        compiler = nccl.cuda_home() / "bin" / "nvcc"
    except nccl.Missing as error:
        pytest.skip(str(error))
    source, library = tmp_path / "two.cu", tmp_path / "two.so"
    source.write_text("__global__ void a(int* x) { *x = 1; }\n")
    chosen = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 90)]
    words = ["-shared", "-Xcompiler", "-fPIC", *chosen, str(source), "-o", str(library)]
    subprocess.run([compiler, *words], check=True)
    whole = library.read_bytes()
    ((place, length),) = (own[1:] for own in sections(whole) if own[0] == ".nv_fatbin")
    changed = []
    for architecture in (80, 90):
        image = bytearray(whole)
        assert prune(image, architecture) >= 1
        pairs = enumerate(zip(image, whole, strict=True))
        changed.append({at for at, (new, old) in pairs if new != old})
        assert all(
            image[at] == 0 and place <= at < place + length for at in changed[-1]
        )
        assert len(changed[-1]) > 300
    assert not changed[0] & changed[1]
    assert prune(bytearray(whole), 75) == 0
