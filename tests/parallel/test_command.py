"""`adasum-hvd doctor`, `bench`, `demo` and `timeline` with the ranks that they start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from adasum_hvd.tools import doctor
from tests.parallel.harness.imported import EXECUTABLE, interpreter
from tests.parallel.harness.launch import environment


def forked() -> dict[str, str]:
    """Return an environment in which the command's Pythons are forks."""
    return environment() | {EXECUTABLE: interpreter()}


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `adasum-hvd WORDS`."""
    return subprocess.run(
        [interpreter(), "-m", "adasum_hvd", *words],
        env=forked() | variables, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip


@pytest.fixture
def ranks_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", interpreter())
    for name, value in forked().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("ranks_are_forks")
def test_doctor_reduces_on_every_backend() -> None:
    """With torch; the command with all frameworks is in tests/soak and in .ci/wheel."""
    found = {one.subject: one for one in doctor.reductions(["torch"])}
    for backend in ("gloo", "mpi"):
        finding = found[f"AdaSum, torch on {backend}"]
        assert finding.found == "6 tensors over 2 ranks equal the reference"
    assert "shared memory" in found["op for torch"].found
    assert doctor.status(list(found.values())) == 0


@pytest.mark.usefixtures("ranks_are_forks")
def test_doctor_reduces_without_horovod() -> None:
    found = doctor.distributed()
    assert found.subject == "AdaSum, torch on torch.distributed"
    assert found.found == "6 tensors over 2 ranks equal the reference", found
    assert found.state == 0


def test_bench_and_its_timeline(tmp_path: Path) -> None:
    output, record = tmp_path / "bench.json", tmp_path / "timeline.json"
    shown = command(
        "bench", "--seconds", "1", "--output", str(output), HOROVOD_TIMELINE=str(record)
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "Horovod AdaSum" in shown.stdout and "torch DDP, Gloo" in shown.stdout
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 4 * (4 + 3 + 1)  # Gloo, MPI, MPI with Horovod's own op
    assert all(len(row["seconds"]) >= 5 and not row["wrong"] for row in rows)
    assert output.with_suffix(".png").stat().st_size > 5000
    phases = json.loads(command("timeline", str(record), "--json").stdout)["phases"]
    assert any(phase["phase"].startswith("NEGOTIATE_") for phase in phases)
    assert all(phase["microseconds"] >= 0 for phase in phases)


@pytest.mark.parametrize("engine", ["horovod", "torch"])
def test_demo(tmp_path: Path, engine: str) -> None:
    words = [
        "demo",
        "--engine",
        engine,
        "--ranks",
        "2",
        "--epochs",
        "2",
        "--output",
        str(tmp_path),
    ]
    shown = command(*words)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    results = json.loads((tmp_path / "demo.json").read_text())
    assert [r["op"] for r in results] == [
        "sum",
        "average",
        "adasum-grad",
        "adasum-delta",
    ]
    assert all(r["identical"] for r in results)
    assert max(r["accuracy"] for r in results) > 0.5
    # What `init` says, once and on rank 0.
    line = ": 2 ranks on 1 host over Gloo; exchange over "
    assert shown.stderr.count(line) == (engine == "horovod")
    assert (tmp_path / "demo.png").stat().st_size > 10_000


@pytest.mark.parametrize("engine", ["horovod", "torch"])
def test_the_demos_ranks_end_with_it(tmp_path: Path, engine: str) -> None:
    """SIGTERM reaches the launcher, which ends its ranks."""
    words = ["demo", "--engine", engine, "--ranks", "2", "--epochs", "9999"]
    demo = subprocess.Popen(
        [sys.executable, "-m", "adasum_hvd", *words, "--output", str(tmp_path)]
    )
    try:
        limit = time.monotonic() + 60
        while len(ranks_of(tmp_path)) < 2:
            assert time.monotonic() < limit and demo.poll() is None
            time.sleep(0.1)
        demo.terminate()
        assert demo.wait(60) == 128 + signal.SIGTERM
        while ranks_of(tmp_path):
            assert time.monotonic() < limit + 60
            time.sleep(0.1)
    finally:
        demo.kill()
        for process in ranks_of(tmp_path):
            os.kill(process, signal.SIGKILL)


def ranks_of(folder: Path) -> list[int]:
    """Return the processes of the demo that writes to the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            words = (process / "cmdline").read_text().split("\0")
            if str(folder) in words and "adasum_hvd.tools.torch_digits" in words[:4]:
                found.append(int(process.name))
    return found
