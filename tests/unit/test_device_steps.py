"""The steps for a machine with CUDA devices, on a machine without one."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from adasum_hvd.horovod.build import nccl
from tests.gpu.run import Report, outcome, take
from tests.gpu.steps import Step, no_horovod, steps

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tests" / "gpu" / "run.py"
PASSED = "== 12 passed, 2 skipped in 3.00s =="
SKIPPED = "SKIPPED [2] tests/gpu/a.py:7: needs a device\n== 2 skipped in 0.10s =="


@pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")), reason="make gpu runs it here"
)
def test_without_a_device_every_step_is_skipped_with_its_reason(tmp_path):
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), "--output", str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *lines, last = shown.stdout.splitlines()
    assert len(lines) > 10
    for line in lines:
        assert re.fullmatch(r"skipped +0\.0 s  .+: expected .+, but got .+", line)
    assert last == f"0 ok, 0 failed, {len(lines)} skipped"
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["counts"] == {"ok": 0, "failed": 0, "skipped": len(lines)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "logs.tar.gz",
        "results.json",
    ]


def test_every_file_that_needs_a_device_is_in_a_step():
    words = {word for step in steps(None) for word in step.line.split()}
    files = (REPOSITORY / "tests" / "gpu").glob("test_*.py")
    assert {str(path.relative_to(REPOSITORY)) for path in files} <= words
    for word in words:
        assert not word.endswith(".py") or (REPOSITORY / word).exists(), word


def test_a_horovod_without_nccl_is_a_reason():
    if importlib.util.find_spec("horovod") is None or nccl.torch_has_cuda():
        pytest.skip("needs a Horovod for a torch without CUDA")
    assert no_horovod() == "expected a Horovod with NCCL, but got one without NCCL"


@pytest.mark.parametrize(
    ("status", "text", "became", "why"),
    [
        (0, PASSED, "ok", "12 passed, 2 skipped in 3.00s"),
        (0, SKIPPED, "skipped", "needs a device"),
        (0, "a table\nof figures", "ok", ""),
        (0, "", "ok", ""),
        (1, "== 1 failed in 1s ==", "failed", "but got 1; 1 failed in 1s"),
        (None, "half a", "failed", "expected its end in 60 s, but got none; half a"),
    ],
)
def test_outcome(status, text, became, why):
    found = outcome(status, 60, text)
    assert found[0] == became
    assert found[1].endswith(why)


def test_a_step_over_its_limit_is_ended_and_its_children_too(tmp_path):
    code = "__import__('subprocess').run(['sleep','1234.5'])"
    row = take(
        Step("slow", 2, (), f"-c {code}"), tmp_path / "log", time.monotonic() + 60
    )
    assert row["became"] == "failed"
    assert "expected its end in 2 s" in row["why"]
    alive = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"1234.5" in words for words in alive)


def test_a_step_does_not_start_too_late(tmp_path):
    row = take(Step("late", 90, (), "-c 1"), tmp_path / "log", time.monotonic() + 10)
    assert (row["became"], row["why"]) == (
        "skipped",
        "expected 30 s for it, but got 10",
    )
    assert take(Step("", 90, (), "-c 1"), tmp_path / "log", math.inf)["became"] == "ok"


def test_results_are_complete_after_every_step(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    report = Report(tmp_path, logs, {"machine": "this"}, [])
    for number in (1, 2):
        line = f"-c open('{logs}/{number}.json','w').write('[{number}]')"
        report.add(
            take(Step(f"n{number}", 9, (), line), logs / f"{number}.log", math.inf)
        )
        found = json.loads((tmp_path / "results.json").read_text())
        assert [row["figures"] for row in found["steps"]] == [[1], [2]][:number]
        with tarfile.open(tmp_path / "logs.tar.gz") as packed:
            assert f"logs/{number}.log" in packed.getnames()
