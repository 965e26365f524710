"""A job whose ranks run cases; their verdicts are read while it runs.

Every rank appends one JSON line per case to its own report. A rank that hangs in a case ends
itself (worker.py) and so the job, and its missing lines say in which case.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from adasum_hvd.horovod.launch import supervisor
from tests.parallel.harness.cases import Case
from tests.parallel.harness.configurations import SIMULATED, Configuration
from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import REPOSITORY, command, environment
from tests.parallel.harness.worker import TEMPORARY

WORKER = ["-m", "tests.parallel.harness.worker"]
TIMEOUT_SECONDS = 1500
POLL_SECONDS = 0.05
# Where a failed job's output and its ranks' reports stay, until the next `make test`.
KEPT = REPOSITORY / "build" / "tests"
Verdicts = Mapping[int, Mapping[str, Any]]


def judge(verdicts: Verdicts, ranks: int, output: str = "") -> str:
    """Return the reason why a case was skipped, "" if it ran.

    Args:
        verdicts: of one case, by rank.
        ranks: how many there must be.
        output: the launcher's, shown if a verdict is missing.

    Raises:
        AssertionError: a rank failed, has no verdict, or skipped what others ran.
    """
    problems = [
        f"rank {rank}:\n{verdicts[rank]['error']}"
        if rank in verdicts
        else f"rank {rank}: no verdict"
        for rank in range(ranks)
        if rank not in verdicts or verdicts[rank]["error"]
    ]
    if problems:
        missing = any(problem.endswith("no verdict") for problem in problems)
        tail = (
            f"\nthe launcher's output ends with:\n{output[-3000:]}" if missing else ""
        )
        raise AssertionError("\n".join(problems) + tail)
    reasons = [verdicts[rank]["skipped"] for rank in range(ranks)]
    if any(reasons) and not all(reasons):
        raise AssertionError(f"skipped on some ranks only, by rank: {reasons}")
    return reasons[0]


class Job:
    """The ranks of a configuration, which run cases in this order."""

    def __init__(
        self,
        configuration: Configuration,
        cases: Sequence[Case] = (),
        launcher: Sequence[str] = (),
    ):
        """Start the ranks.

        Args:
            configuration: which files, and how.
            cases: all of the configuration's when empty.
            launcher: the words in front of the program's, if they are not `command`'s.
        """
        self.configuration = configuration
        self.cases = list(cases) or configuration.cases
        self.seconds = 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="adasum-ranks-"))
        self._verdicts: dict[str, dict[int, dict]] = {}
        self._read: dict[Path, int] = {}
        words = list(launcher) or command(
            configuration.backend, configuration.ranks, configuration.hosts
        )
        framework = configuration.framework
        words += python(framework) if framework else [sys.executable]
        words += [*WORKER, "+".join(configuration.files), str(self._folder)]
        self._began = time.monotonic()
        with (self._folder / "output").open("w") as output:
            self._process = supervisor.start(
                [*words, *map(str, self.cases)],
                env=environment(configuration.environment) | _variables(configuration),
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self, case: Case | str) -> None:
        """Raise what a case's verdicts are; the last case's are the job's, too.

        Raises:
            AssertionError: as :func:`judge`, with the tracebacks of all ranks; or every rank
                passed, and the job failed.
            pytest.skip.Exception: all ranks skipped the case; with their reason.
        """
        if reason := self.reason_to_skip(case):
            pytest.skip(reason)

    def reason_to_skip(self, case: Case | str) -> str:
        """Return why all ranks skipped a case, "" if they ran it; raise as `check` does."""
        found = self.verdicts(case)
        reason = judge(found, self.configuration.ranks, self.output)
        if self._find(case) == self.cases[-1]:
            self.wait()
            failed = any(
                v["error"] for of in self._verdicts.values() for v in of.values()
            )
            if self._process.returncode and not failed:
                raise AssertionError(
                    f"all cases passed, but the job ended with status "
                    f"{self._process.returncode}:\n{self.output[-3000:]}"
                )
        return reason

    def results(self, case: Case | str) -> dict[int, Any]:
        """Return the values that a case returned, by rank."""
        return {rank: one["result"] for rank, one in self.verdicts(case).items()}

    def verdicts(self, case: Case | str) -> dict[int, dict]:
        """Wait until all ranks have run a case or the job has ended; return its verdicts."""
        name = str(self._find(case))
        while True:
            ended = self._has_ended()
            self._read_reports()
            found = self._verdicts.get(name, {})
            if ended or len(found) == self.configuration.ranks:
                return found
            time.sleep(POLL_SECONDS)

    @property
    def output(self) -> str:
        """The output of the launcher and the ranks so far."""
        return (self._folder / "output").read_text(errors="replace")

    def slowest(self, count: int) -> str:
        """Return the cases that took longest, on whatever rank."""
        seconds = {
            case.partition("::")[2]: max(v["seconds"] for v in of_case.values())
            for case, of_case in self._verdicts.items()
        }
        longest = sorted(seconds, key=lambda case: -seconds[case])[:count]
        return ", ".join(f"{case} {seconds[case]:.1f}" for case in longest)

    def wait(self) -> None:
        """Wait for the job's end."""
        while not self._has_ended():
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the job, if it has not, and remove its files; those of a failure are kept."""
        self._end()
        if self._process.returncode or any(
            verdict["error"]
            for of in self._verdicts.values()
            for verdict in of.values()
        ):
            one = self.configuration
            name = f"{one.files[0]}-{one.backend}{one.ranks}-{self._folder.name}"
            unneeded = shutil.ignore_patterns(TEMPORARY)
            shutil.copytree(self._folder, KEPT / name, ignore=unneeded)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _find(self, case: Case | str) -> Case:
        return next(c for c in self.cases if case in (c, c.name))

    def _has_ended(self) -> bool:
        if self._process.poll() is None:
            if time.monotonic() - self._began < TIMEOUT_SECONDS:
                return False
            self._end()
        self.seconds = self.seconds or time.monotonic() - self._began
        return True

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _read_reports(self) -> None:
        """Read the complete lines that ranks have appended since the last call."""
        for report in self._folder.glob("rank-*.jsonl"):
            with report.open() as file:
                file.seek(self._read.get(report, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[report] = self._read.get(report, 0) + len(whole.encode())
            rank = int(report.stem.removeprefix("rank-"))
            for line in whole.splitlines():
                verdict = json.loads(line)
                self._verdicts.setdefault(verdict["case"], {})[rank] = verdict


def _variables(configuration: Configuration) -> dict[str, str]:
    """Return the variables of simulated devices, whose library is built first."""
    if configuration.files != SIMULATED:
        return {}
    from tests.parallel.harness.simulated_horovod import make

    return {"ADASUM_SIMULATED_HOROVOD": str(make())}
