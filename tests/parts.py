"""Runs the parts of `make test`, two at a time, and shows how far each one is.

    python -m tests.parts [--tier TIER] [PART ...]   # all of them unless some are named

A part is one run of pytest. Its output is printed when it ends; until then a line says how many
of its tests are done, and in which file it is. `tiers.py` says which tests a tier has. The output
stays in build/tests, with that of the ranks of each job that failed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.parallel.harness.job import KEPT
from tests.tiers import ALL, TIERS

SHARING = [
    f"tests/parallel/{name}" for name in ("cases", "test_bits.py", "test_device.py")
]
FAULTS = "tests/parallel/test_faults.py"
# The longest part first, and a short one last: then both places are busy until the end.
PARTS = {
    "cases": SHARING,
    "unit": ["tests/unit"],
    "jobs": ["tests/parallel", *(f"--ignore={path}" for path in (*SHARING, FAULTS))],
    "faults": [FAULTS],
    "hosts": ["tests/hosts"],  # network namespaces: skipped without root and iproute2
}
AT_ONCE = 2
PLAIN_SECONDS = 20  # between two lines about a part, without a terminal
NO_TESTS = 5  # pytest's exit status
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
PROGRESS = "ADASUM_TESTS_PROGRESS"  # the file in which a part writes how far it is


class Progress:
    """The plugin of a part's pytest: writes "done/total file" after each test."""

    def __init__(self, path: Path):
        self.path, self.done, self.total, self.left_out = path, 0, 0, 0

    def _write(self, file: str) -> None:
        self.path.write_text(f"{self.done}/{self.total} {file}")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out += len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(f"{self.done}/{self.done + self.left_out} ended")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid.partition("::")[0])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.done += 1
        self._write(nodeid.partition("::")[0])


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(PROGRESS):
        config.pluginmanager.register(Progress(Path(path)))


def command_of(name: str, tier: str) -> list[str]:
    """Return the command of a part."""
    chosen = ["--tier", tier] * (tier != ALL)
    return [sys.executable, "-m", "pytest", *PARTS[name], *chosen]


class Part:
    """A running part."""

    def __init__(self, name: str, tier: str):
        self.name, self._began, self._shown = name, time.monotonic(), 0.0
        self._progress, self._log = KEPT / f"{name}.progress", KEPT / f"{name}.log"
        self._last = ""
        words = [*command_of(name, tier), "-p", "tests.parts"]
        words += ["--color=yes"] * sys.stdout.isatty()
        with self._log.open("w") as log:
            # A session each: where Linux divides the processors by session, ranks that wait in
            # MPI's loop of sched_yield() then yield to one another and not to all of a part.
            self.process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {PROGRESS: str(self._progress)},
            )  # fmt: skip

    def state(self) -> str:
        """Return "name done/total file"."""
        known = self._progress.exists() and self._progress.read_text()
        return f"{self.name} {known or 'collecting'}"

    def news(self) -> str:
        """Return the state if it has changed and was not returned for a while."""
        state, now = self.state(), time.monotonic()
        if state == self._last or now - self._shown < PLAIN_SECONDS:
            return ""
        self._last, self._shown = state, now
        return state

    def counts(self) -> Counter[str]:
        """Return how many tests have run, and of how many in all tiers."""
        run, _, known = self.state().split()[1].partition("/")
        return Counter({"run": int(run), "known": int(known)}) if known else Counter()

    def report(self) -> str:
        """Return what pytest printed, under the part's name and its duration."""
        seconds = time.monotonic() - self._began
        return f"\n=== {self.name}, {seconds:.0f} s\n{self._log.read_text()}"


def show(running: list[Part]) -> None:
    """Redraw the line of a terminal; elsewhere print a line per part now and then."""
    if sys.stdout.isatty():
        line = " | ".join(part.state().replace("tests/", "") for part in running)
        width = os.get_terminal_size().columns - 1
        print(f"\r\033[K{line[:width]}", end="", flush=True)
    else:
        for news in filter(None, (part.news() for part in running)):
            print(news, flush=True)


def interrupt(running: list[Part]) -> None:
    """End parts as Ctrl-C does, which does not reach their sessions."""
    for part in running:
        part.process.send_signal(signal.SIGINT)
    for part in running:
        part.process.wait()


@contextmanager
def divided_by_process(switch: Path = AUTOGROUP) -> Iterator[None]:
    """Let Linux divide the processors by process and not by session, where this user may.

    Under Linux 6.18, two ranks that wait in MPI's loop of sched_yield() in one session can keep
    those of all others from running, for a minute and more: docs/troubleshooting.md.
    """
    try:
        before = switch.read_text()
        switch.write_text("0\n")
    except OSError:
        before = ""
    try:
        yield
    finally:
        if before:
            switch.write_text(before)


def main(names: list[str], tier: str = ALL) -> int:
    """Run parts; return 0 if all of them passed. One alone prints as pytest does."""
    if len(names) == 1:
        return subprocess.call(command_of(names[0], tier))
    KEPT.mkdir(parents=True, exist_ok=True)
    lock = (KEPT.parent / "tests.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"tests: expected one run, but another one writes to {KEPT}; wait for it")
        return 1
    shutil.rmtree(KEPT)
    KEPT.mkdir()
    began, waiting, running, failed = time.monotonic(), list(names), [], []
    counts: Counter[str] = Counter()
    with ExitStack() as left:
        left.callback(interrupt, running)
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(Part(waiting.pop(0), tier))
            for part in [p for p in running if p.process.poll() is not None]:
                running.remove(part)
                print(part.report(), flush=True)
                counts += part.counts()
                if part.process.returncode not in (0, NO_TESTS):
                    failed.append(part.name)
            show(running)
            time.sleep(0.5)
    took, used = time.monotonic() - began, sum(os.times()[:4]) / 60
    print(f"{', '.join(names)}: {took:.0f} s, {used:.1f} CPU-minutes")
    more = "; `make check` runs all" if counts["run"] < counts["known"] else ""
    print(f"run {counts['run']:,} of {counts['known']:,}{more}")
    if failed:
        print(f"output: {KEPT}\nfailed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    # Also SIGINT, which a job in the background of a shell would ignore, and its children too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tier", choices=TIERS, default=ALL)
    parser.add_argument("parts", nargs="*", metavar="PART")
    given = parser.parse_args()
    with divided_by_process():
        sys.exit(main(given.parts or list(PARTS), given.tier))
