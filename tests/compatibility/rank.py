"""One rank of a launch: pytest on one of Horovod's files, every verdict written as it falls.

The ranks wait for one another after each test, so that one that failed early does not meet
its peers in another test. A test that outlasts its limit ends the process with a traceback;
the ranks are started again and have one more try.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest

from tests.compatibility.reports import DONE, ENDED, FINISHED, READY, STARTED, Report
from tests.compatibility.swap import swap

_WORSE = ("passed", "skipped", "failed")  # of a test's set-up, body and tear-down


class Recorder:
    """Pytest's hooks: leave out what earlier launches did, write what this one finds."""

    def __init__(self, directory: Path, rank: int, ranks: int, limit: float) -> None:
        self.report = Report(directory, rank)
        self.all_reports = [Report(directory, peer) for peer in range(ranks)]
        self.limit = limit
        self.outcomes: dict[str, str] = {}
        self.why = ""

    def pytest_collectreport(self, report: Any) -> None:
        """Write down a file that cannot be imported."""
        if report.failed:
            self.report.write(
                ENDED, report.nodeid, {"": "failed"}, str(report.longrepr)
            )

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out the tests that have a verdict."""
        done = json.loads((self.report.path.parent / DONE).read_text())
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_collection_finish(self) -> None:
        """Start together: no test's limit holds another rank's imports."""
        leave_out_muon()
        self.report.write(READY)
        self.wait_for_peers(READY)

    def wait_for_peers(self, event: str) -> None:
        """Return when every rank has written `event` as often as this one."""
        count = len(self.report.of(event))
        while any(len(peer.of(event)) < count for peer in self.all_reports):
            time.sleep(0.05)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Run a test under its limit, and wait for the other ranks."""
        faulthandler.dump_traceback_later(self.limit, exit=True)
        self.outcomes, self.why = {"": "passed"}, ""
        self.report.write(STARTED, item.nodeid)
        result = yield
        self.report.write(ENDED, item.nodeid, self.outcomes, self.why)
        # The one that hangs is to say where, before this one ends the job.
        faulthandler.dump_traceback_later(self.limit + 10, exit=True)
        self.wait_for_peers(ENDED)
        faulthandler.cancel_dump_traceback_later()
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst outcome of the test, and of each of its sub-tests."""
        context = getattr(report, "context", None)
        part = f"{context.msg or ''} {context.kwargs or ''}".strip() if context else ""
        known = self.outcomes.get(part, "passed")
        self.outcomes[part] = max(known, report.outcome, key=_WORSE.index)
        if report.failed:
            self.why += f"{part}\n{report.longreprtext}\n"


def leave_out_muon() -> None:
    """Hide an optimizer, newer than the tests, that takes no vectors.

    They give a model with biases to every class of `torch.optim`, by the name of its module.
    """
    muon = getattr(sys.modules.get("torch.optim"), "Muon", None)
    if muon is not None:
        muon.__module__ = "newer.than.horovod"


def main() -> None:
    """Run `rank.py SOURCE FILE DIRECTORY LIMIT_SECONDS SELECT [MODULE TO SWAP...]`."""
    source, file, directory, limit, select, *modules = sys.argv[1:]
    rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    ranks = os.environ.get("HOROVOD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE"))
    assert rank is not None and ranks is not None, "start it by horovodrun or mpirun"
    (found,) = Path(source, "test").glob(f"*/{file}")
    os.chdir(found.parent)
    if found.parent.name == "integration":  # starts its ranks by itself
        del os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]
    swap(modules)
    recorder = Recorder(Path(directory), int(rank), int(ranks), float(limit))
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--capture=no",
        "-k",
        select,
    ]
    pytest.main([*options, file], plugins=[recorder])
    recorder.report.write(FINISHED)


if __name__ == "__main__":
    main()
