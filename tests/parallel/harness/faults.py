"""Faults of one rank of a job, by phase and transport, and how soon the others report it.

`python -m tests.parallel.harness.faults` goes through all of it and prints the table of
docs/faults.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import (
    PROGRAMS,
    command,
    environment,
    run_launcher,
    waits,
)

JOB = PROGRAMS / "faults_job.py"
RANKS = 3
VICTIM = 1
SILENCE_SECONDS = 3  # ADASUM_HVD_TIMEOUT_SECONDS, 30 unless set
STALL_SECONDS = 9  # ADASUM_HVD_STALL_SECONDS, 600 unless set
GLOO_SECONDS = 5  # HOROVOD_GLOO_TIMEOUT_SECONDS, of Horovod's own negotiation
CHECKPOINT_SECONDS = 6  # ADASUM_HVD_CHECKPOINT_SECONDS, 60 unless set
DEFAULT_SECONDS = 30  # of ADASUM_HVD_TIMEOUT_SECONDS and HOROVOD_GLOO_TIMEOUT_SECONDS
STARTS = 4  # of a job that a busy machine keeps from its fault
# In the output of such a job: of Horovod's rendezvous, of its start, of the op, and of its end.
TOO_SLOW = (
    *("Wait timeout after", "Timed out waiting", "did not respond for"),
    "this process ends",
)

TRANSPORTS = {
    "shared memory, Gloo": ("gloo", "auto"),
    "shared memory, MPI": ("mpi", "auto"),
    "Gloo": ("gloo", "off"),
    "MPI": ("mpi", "off"),
}
FAULTS = {
    "memory": "its memory runs out",
    "raise": "its script raises",
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "pause": "SIGSTOP, and SIGCONT after 4 s",
    "missing": "it never submits the tensor",
}
PHASES = {
    "memory": ("exchange",),
    "raise": ("negotiation",),
    "kill": ("negotiation", "exchange", "gather"),
    "stop": ("negotiation", "exchange", "gather"),
    "pause": ("exchange",),
    "missing": ("negotiation",),
}
# Before AdaSum has reduced anything, where Horovod averages; in the process set, too.
FIRST = "first negotiation"


@dataclass(frozen=True)
class Fault:
    """A fault of rank 1, its phase, and the transport between the ranks."""

    transport: str
    fault: str
    phase: str
    sets: bool = False  # process sets of ranks 0 and 1, and of 1 and 2
    exits: bool = (
        False  # the other ranks call sys.exit() after the error; default limits
    )

    def __str__(self) -> str:
        what = f"{self.transport}-{self.fault}-{self.phase}"
        what += "-process sets" * self.sets + "-exits" * self.exits
        return what.replace(",", "").replace(" ", "-").lower()


@dataclass(frozen=True)
class Consequence:
    """The reports of the other ranks.

    Attributes:
        status: the launcher's.
        errors: by rank, of those that lived to see one.
        seconds: by rank, from the fault to the error.
        job_seconds: from the fault to the end of the job, the victim's process included.
        output: of the launcher and the ranks.
        victim_left: whether the victim's process was there at the end.
        ended: the ranks that have shut Horovod down after the error; with process sets only.
    """

    status: int
    errors: dict[int, str]
    seconds: dict[int, float]
    job_seconds: float
    output: str
    victim_left: bool
    ended: set[int]


EVERY = [
    Fault(transport, fault, phase)
    for fault, phases in PHASES.items()
    for phase in phases
    for transport in TRANSPORTS
]
# Horovod negotiates the end of process sets; over MPI, without a rank, that has no end of its own.
EVERY += [
    Fault(transport, fault, phase, sets=True)
    for fault, phases in PHASES.items()
    for phase in phases[:2]
    for transport in TRANSPORTS
    if "Gloo" in transport or fault in ("memory", "pause")
]
# What those who wait can share does not matter then.
EVERY += [Fault(transport, "stop", FIRST) for transport in ("Gloo", "MPI")]
EVERY += [Fault(transport, "stop", "exchange", exits=True) for transport in TRANSPORTS]
EVERY += [
    Fault(transport, "missing", FIRST, sets=True) for transport in ("Gloo", "MPI")
]


def _ends_first(fault: Fault) -> bool:
    """Return whether ranks may end without an error in Python.

    mpirun ends a job that loses a process; a wait of Horovod's over MPI ends with the process.
    """
    backend, _ = TRANSPORTS[fault.transport]
    waits_in_horovod = fault.fault == "stop" and "negotiation" in fault.phase
    return backend == "mpi" and (fault.fault == "kill" or waits_in_horovod)


def _run_job(
    fault: Fault, words: list[str], variables: dict[str, str], folder: Path
) -> tuple[int, str]:
    """Run a job, again if it was slower than a limit: before the fault, or in another phase.

    Over MPI a rank that is stopped later than meant, or that takes seconds to leave, ends them all.
    """
    for _ in range(STARTS):
        status, output = run_launcher([*words, str(folder)], variables, 180)
        known = _ends_first(fault) or len([*folder.glob("rank-[02].json")]) == RANKS - 1
        struck = (folder / "fault").exists()
        if (struck and known) or not any(reason in output for reason in TOO_SLOW):
            break
        for path in folder.iterdir():
            path.unlink()
    return status, output


def run(fault: Fault) -> Consequence:
    """Start a job of three ranks, let it happen, and return what came of it."""
    backend, local = TRANSPORTS[fault.transport]
    limits = {
        "ADASUM_HVD_LOCAL": local,
        "ADASUM_HVD_TIMEOUT_SECONDS": str(SILENCE_SECONDS),
        "ADASUM_HVD_STALL_SECONDS": str(STALL_SECONDS),
        "ADASUM_HVD_CHECKPOINT_SECONDS": str(CHECKPOINT_SECONDS),
    }
    # It limits the start of a process set, too, which takes seconds on a busy machine.
    if fault.fault in ("stop", "pause"):
        limits["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_SECONDS)
    if fault.exits:
        limits = {"ADASUM_HVD_LOCAL": local, **dict(waits(DEFAULT_SECONDS))}
    variables = environment(tuple(limits.items()))
    with tempfile.TemporaryDirectory(prefix="adasum-fault-") as name:
        folder = Path(name)
        words = [*command(backend, RANKS), *python(), str(JOB)]
        words += [fault.fault, fault.phase, "two" if fault.sets else "all"]
        words += ["exits" if fault.exits else "goes-on"]
        status, output = _run_job(fault, words, variables, folder)
        assert (folder / "fault").exists(), f"{fault}: not as far\n{output[-3000:]}"
        struck, victim = (folder / "fault").read_text().split()
        gone_by = time.monotonic() + 20  # the launchers ask first, and kill later
        while runs := Path("/proc", victim).exists():
            if time.monotonic() > gone_by:
                break
            time.sleep(0.05)
        job_ended = time.clock_gettime(time.CLOCK_MONOTONIC)
        reports = {
            int(path.stem.removeprefix("rank-")): json.loads(path.read_text())
            for path in folder.glob("rank-*.json")
        }
        ended = {
            int(path.name.removeprefix("ended-")) for path in folder.glob("ended-*")
        }
    return Consequence(
        status,
        {rank: report["error"] for rank, report in reports.items()},
        {
            rank: report["seconds_at"] - float(struck)
            for rank, report in reports.items()
        },
        job_ended - float(struck),
        output,
        runs,
        ended,
    )


def seconds_allowed(fault: Fault) -> float:
    """Return how long the others may wait, by docs/reliability.md, on a machine of our own."""
    if fault.fault == "missing":
        return STALL_SECONDS
    if fault.fault not in ("stop", "pause"):
        return 2.0
    if "negotiation" not in fault.phase:
        return (DEFAULT_SECONDS if fault.exits else SILENCE_SECONDS) + 2.0
    backend, _ = TRANSPORTS[fault.transport]
    return GLOO_SECONDS + 2.0 if backend == "gloo" else SILENCE_SECONDS + 4.0


def check(fault: Fault, consequence: Consequence) -> None:
    """Check that the others learned of it in time, and of which rank; and that all ended.

    Raises:
        AssertionError: with the reports of the ranks.
    """
    reports = f"{consequence.errors}\n{consequence.output[-3000:]}"
    assert consequence.status != 0, reports
    assert "DONE" not in consequence.output, reports
    assert "ended after" not in consequence.output, reports
    assert "terminate called" not in consequence.output, reports
    assert not consequence.victim_left, "the victim's process stays"
    assert fault.fault != "pause" or VICTIM in consequence.errors, reports
    others = {r: e for r, e in consequence.errors.items() if r != VICTIM}
    words = list(others.values())
    if ends_first := _ends_first(fault):
        words.append(consequence.output)
    else:
        assert sorted(others) == [r for r in range(RANKS) if r != VICTIM], reports
    assert any("rank 1" in text or "ranks 1" in text for text in words), reports
    assert ends_first or all("1" in text for text in words), reports
    assert not fault.sets or consequence.ended >= set(others), reports
    # Shared machines are slow at times: what is checked is that there is an end, not its tenths.
    slack = 3 * seconds_allowed(fault) + 10
    for rank in consequence.errors:
        assert consequence.seconds[rank] <= slack, (rank, consequence.seconds)
    # Horovod's shutdown has 5 s, a launcher some 10 s for the stopped process.
    most = 2 * DEFAULT_SECONDS + 5 if fault.exits else slack + 30
    assert consequence.job_seconds <= most, consequence.job_seconds


def row(fault: Fault, consequence: Consequence) -> str:
    """Return a line of the table: fault, phase, transport, seconds to error and end, words."""
    seconds = [v for k, v in consequence.seconds.items() if k != VICTIM]
    known = f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "ended first"
    words = next((e for k, e in sorted(consequence.errors.items()) if k != VICTIM), "")
    words = words.partition("AdaSum: ")[
        2
    ]  # in front of it Horovod's, which are the same
    return (
        f"| {FAULTS[fault.fault]} | {fault.phase} | {fault.transport}"
        f"{', process sets' * fault.sets}{', the others exit' * fault.exits} | {known} | "
        f"{consequence.job_seconds:.1f} | {words} |"
    )


if __name__ == "__main__":
    print("| rank 1 | in | transport | error after, s | job ended, s | error |")
    print("|---|---|---|---|---|---|")
    chosen = sys.argv[1:]
    for one in EVERY:
        if not chosen or str(one) in chosen:
            print(row(one, run(one)), flush=True)
