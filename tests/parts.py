"""Runs the parts of `make test`, two at a time, and shows how far each one is.

    python -m tests.parts [PART ...]   # all of them unless some are named

A part is one run of pytest. Its output is printed when it ends; until then a line says how many
of its tests are done, and in which file it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

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
PROGRESS = "ADASUM_TESTS_PROGRESS"  # the file in which a part writes how far it is


class Progress:
    """The plugin of a part's pytest: writes "done/total file" after each test."""

    def __init__(self, path: Path):
        self.path, self.done, self.total = path, 0, 0

    def _write(self, file: str) -> None:
        self.path.write_text(f"{self.done}/{self.total} {file}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid.partition("::")[0])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.done += 1
        self._write(nodeid.partition("::")[0])


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(PROGRESS):
        config.pluginmanager.register(Progress(Path(path)))


def command_of(name: str) -> list[str]:
    """Return the command of a part."""
    return [sys.executable, "-m", "pytest", *PARTS[name]]


class Part:
    """A running part."""

    def __init__(self, name: str, folder: Path):
        self.name, self._began, self._shown = name, time.monotonic(), 0.0
        self._progress, self._log = folder / f"{name}.progress", folder / f"{name}.log"
        self._last = ""
        words = [*command_of(name), "-p", "tests.parts"]
        words += ["--color=yes"] * sys.stdout.isatty()
        with self._log.open("w") as log:
            # A session each: Linux divides the processors by session, and ranks that wait in
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


def main(names: list[str]) -> int:
    """Run parts; return 0 if all of them passed. One alone prints as pytest does."""
    if len(names) == 1:
        return subprocess.call(command_of(names[0]))
    began, waiting, running, failed = time.monotonic(), list(names), [], []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as left:
        left.callback(interrupt, running)
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(Part(waiting.pop(0), Path(folder)))
            for part in [p for p in running if p.process.poll() is not None]:
                running.remove(part)
                print(part.report(), flush=True)
                if part.process.returncode not in (0, NO_TESTS):
                    failed.append(part.name)
            show(running)
            time.sleep(0.5)
    print(f"{', '.join(names)}: {time.monotonic() - began:.0f} s")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    # Also SIGINT, which a job in the background of a shell would ignore, and its children too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    sys.exit(main(sys.argv[1:] or list(PARTS)))
