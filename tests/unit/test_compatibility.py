"""What tests/compatibility decides, on reports and modules made up for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "compatibility"))

import compare
import launches
from reports import ENDED, FINISHED, STARTED, Report
from wanted import WANTED

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "tests" / "compatibility"
A, B = "test_torch.py::T::test_a", "test_torch.py::T::test_b"


def test_only_what_passes_with_horovods_alone_is_lost() -> None:
    theirs = {
        (A, ""): {0: "passed", 1: "passed"},
        (A, "n=1"): {0: "passed", 1: "passed"},
        (B, ""): {0: "failed", 1: "skipped"},
    }
    ours = {
        (A, ""): {0: "passed", 1: "skipped"},
        (B, ""): {0: "failed", 1: "failed"},
    }
    assert list(compare.lost(theirs, ours)) == [
        (A, "", 1, "skipped"),
        (A, "n=1", 0, "missing"),
        (A, "n=1", 1, "missing"),
    ]
    assert list(compare.lost(theirs, theirs)) == []


def test_what_is_wanted_stands_for_a_test_and_its_parts() -> None:
    differences = [(A, "", 0, "failed"), (A, "n=1", 1, "missing"), (B, "", 0, "failed")]
    assert compare.unwanted(differences, {A: "why"}) == [(B, "", 0, "failed")]


def test_what_no_longer_differs_is_named_where_its_file_was_run() -> None:
    wanted = {A: "why", B: "why", "test_tensorflow.py::T::test_c": "why"}
    assert compare.stale([A], ["test_torch.py"], wanted) == [B]


def test_a_test_counts_once_by_its_worst_rank() -> None:
    verdicts = {
        (A, ""): {0: "passed", 1: launches.NO_END},
        (A, "n=1"): {0: "passed"},
        (B, ""): {0: "passed", 1: "skipped"},
    }
    assert compare.count(verdicts) == "0 / 1 / 1"


def test_a_hang_gets_a_verdict_on_every_rank_that_has_none(tmp_path: Path) -> None:
    reports = [Report(tmp_path, rank) for rank in range(2)]
    for report in reports:
        report.write(STARTED, A)
    reports[0].write(ENDED, A, {"": "passed"})
    launches.close_unfinished(reports, "a traceback")
    verdicts, reasons = launches.collect(reports)
    assert verdicts == {(A, ""): {0: "passed", 1: launches.NO_END}}
    assert reasons == {(A, 1): "a traceback"}
    assert [report.unfinished() for report in reports] == [[], []]


def test_a_report_knows_its_end_and_leaves_half_a_line(tmp_path: Path) -> None:
    report = Report(tmp_path, 0)
    assert not report.finished() and report.lines() == []
    report.write(FINISHED)
    with report.path.open("a") as file:
        file.write('{"event": "sta')
    assert report.finished() and len(report.lines()) == 1


def test_the_same_import_gives_ours() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
        "from swap import swap; swap(['horovod.torch'])\n"
        "import horovod.torch as hvd, horovod.torch.mpi_ops as theirs\n"
        "from horovod.torch import allreduce\n"
        "import adasum_hvd.torch as ours\n"
        "assert hvd is ours and allreduce is ours.allreduce\n"
        "assert theirs.__name__ == 'horovod.torch.mpi_ops'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


def test_a_checkout_is_asked_for() -> None:
    words = [sys.executable, str(FOLDER / "compare.py"), "--source", "nowhere"]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.returncode == 2
    assert "required a checkout of Horovod" in run.stderr


@pytest.mark.parametrize("test", WANTED)
def test_what_is_wanted_has_a_reason_and_a_file_that_is_run(test: str) -> None:
    assert test.partition("::")[0] in compare.FILES
    assert WANTED[test]
