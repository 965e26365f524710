"""Runs one of Horovod's test files on several ranks until every test has a verdict."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from launch import command, environment
from reports import ENDED, FINISHED, Report

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from jobs import REPOSITORY, run_launcher

RANK = Path(__file__).with_name("rank.py")
LAUNCH_SECONDS = 3600
NO_END = "no end"  # it hung until its limit, or its process died

# Test and sub-test ("" for the test itself), then the rank.
Verdicts = dict[tuple[str, str], dict[int, str]]
Reasons = dict[tuple[str, int], str]


def run_file(
    source: Path,
    file: str,
    backend: str,
    ranks: int,
    limit_seconds: float,
    select: str,
    modules: Sequence[str],
) -> tuple[Verdicts, Reasons]:
    """Return every verdict and the tracebacks of failed tests.

    Args:
        source: a checkout of Horovod.
        file: in its test/parallel.
        backend: "gloo" or "mpi".
        ranks: how many processes.
        limit_seconds: for one test.
        select: pytest's -k.
        modules: keys of `swap.OURS`; none for Horovod's own.

    Raises:
        RuntimeError: a launch ended without a new verdict.
    """
    path = os.pathsep.join(
        filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    )
    # The checkout stays as it is, and Horovod's module gets Horovod's own AdaSum.
    more = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if not modules:
        more["ADASUM_HVD_OP"] = "off"
    variables = environment(tuple(more.items()))
    with tempfile.TemporaryDirectory() as directory:
        reports = [Report(Path(directory), rank) for rank in range(ranks)]
        words = [*command(backend, ranks), sys.executable, str(RANK), str(source), file]
        words += [directory, str(limit_seconds), select, *modules]
        while not all(report.of(FINISHED) for report in reports):
            before = sum(len(report.of(ENDED)) for report in reports)
            _, said = run_launcher(words, variables, LAUNCH_SECONDS)
            close_unfinished(reports, said[-8000:])
            if sum(len(report.of(ENDED)) for report in reports) == before:
                raise RuntimeError(
                    f"{file}, {backend}: no verdict in a launch:\n{said}"
                )
        return collect(reports)


def close_unfinished(reports: Sequence[Report], said: str) -> None:
    """Give a verdict to what a launch left behind, the same tests on every rank.

    Args:
        reports: one per rank.
        said: the end of what the launch printed.
    """
    unfinished = sorted({test for report in reports for test in report.unfinished()})
    for report in reports:
        ended = {line["test"] for line in report.of(ENDED)}
        for test in unfinished:
            if test not in ended:
                report.write(ENDED, test, {"": NO_END}, said)


def collect(reports: Sequence[Report]) -> tuple[Verdicts, Reasons]:
    """Return the verdicts and reasons of all ranks' reports, in the order of the tests."""
    verdicts: Verdicts = {}
    reasons: Reasons = {}
    for rank, report in enumerate(reports):
        for line in report.of(ENDED):
            test = line["test"].rpartition("/")[2]
            for part, outcome in line["parts"].items():
                verdicts.setdefault((test, part), {})[rank] = outcome
            if line["why"]:
                reasons[test, rank] = line["why"]
    return verdicts, reasons
