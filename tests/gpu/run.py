"""All that needs a CUDA device, the most valuable first; what cannot run is counted, with why.

    python tests/gpu/run.py [--minutes 9] [--output build/gpu]    # `make gpu`; a kit's end, too

A step that fails does not keep the later ones from running. With `--minutes`, each has a limit of
its own. After every step the output folder has new results.json and logs.tar.gz, because the
machine may be taken away at any time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from adasum_hvd.horovod.launch import supervisor  # noqa: E402
from tests.gpu.steps import PROGRAMS, Step, machine, steps  # noqa: E402

# Logs are complete when a step is cut; plugins of a machine may not fit a kit's pytest.
ALONE = {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # ranks beyond the devices share them


def outcome(status: int | None, seconds: float, text: str) -> tuple[str, str]:
    """Return what became of a step that ended with this status and output, and why."""
    last = (text.splitlines() or [""])[-1].strip("= ")[-200:]
    if status is None:
        return "failed", f"expected its end in {seconds:.0f} s, but got none; {last}"
    if status:
        return "failed", f"expected status 0, but got {status}; {last}"
    if re.search(r"\d+ skipped", last) and not re.search(r"\d+ passed", last):
        reason = re.search(r"^SKIPPED \[\d+\] \S+ (.+)", text, re.MULTILINE)
        return "skipped", reason[1] if reason else last
    return "ok", last if re.search(r"\d+ passed", last) else ""


def take(step: Step, log: Path, ends: float) -> dict[str, Any]:
    """Run a step; return what became of it, why, and how long it took."""
    row: dict[str, Any] = {"name": step.name, "became": "skipped", "seconds": 0.0}
    if why := step.missing(ends):
        return row | {"why": why}
    limit = math.inf if ends == math.inf else min(step.seconds, ends - time.monotonic())
    places = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(places), **ALONE}
    figures, started = log.with_suffix(".json"), time.monotonic()
    with (
        log.open("w") as sink,
        supervisor.running(
            step.command(figures),
            cwd=REPOSITORY,
            env=os.environ | SHARED | own,
            stdout=sink,
            stderr=sink,
        ) as process,
    ):
        try:
            status = process.wait(None if limit == math.inf else limit)
        except subprocess.TimeoutExpired:
            status = None
    row["seconds"] = round(time.monotonic() - started, 1)
    row["became"], row["why"] = outcome(status, limit, log.read_text(errors="replace"))
    with suppress(OSError, ValueError):  # none, or cut while they were written
        row["figures"] = json.loads(figures.read_text())
    return row


@dataclass(frozen=True)
class Report:
    """The outcome of all steps so far, on the screen and in the output folder."""

    output: Path
    logs: Path
    header: dict[str, Any]
    rows: list[dict[str, Any]]

    def counts(self) -> dict[str, int]:
        """Return how many steps became what."""
        found = Counter(row["became"] for row in self.rows)
        return {word: found[word] for word in ("ok", "failed", "skipped")}

    def add(self, row: dict[str, Any]) -> None:
        """Print a step's line, and write everything anew."""
        self.rows.append(row)
        why = f": {row['why']}" if row["why"] else ""
        print(
            f"{row['became']:8}{row['seconds']:6.1f} s  {row['name']}{why}", flush=True
        )
        found = {**self.header, "counts": self.counts(), "steps": self.rows}
        results, packed = self.output / "results.json", self.output / "logs.tar.gz"
        _replace(results, lambda path: path.write_text(json.dumps(found, indent=1)))
        _replace(packed, self._pack)

    def _pack(self, path: Path) -> None:
        with tarfile.open(path, "w:gz") as archive:
            archive.add(self.logs, "logs")


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file anew; it is complete at any time."""
    new = path.with_name(f".{path.name}")
    write(new)
    new.replace(path)


def main() -> int:
    """Take every step; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, help="for all steps; no limit by default"
    )
    parser.add_argument("--output", type=Path, default=Path("build", "gpu"))
    parser.add_argument("--set-up", type=Path, help=argparse.SUPPRESS)  # by a kit
    options = parser.parse_args()
    ends = math.inf
    if options.minutes is not None:
        ends = time.monotonic() + 60 * options.minutes
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    kit = json.loads(options.set_up.read_text()) if options.set_up else {}
    os.environ.setdefault(PROGRAMS, str(output / "programs"))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as at_end:
        if kit:
            at_end.callback(shutil.rmtree, options.set_up.parent, True)
        logs = Path(folder)
        found = {"kit": kit.get("manifest"), "machine": machine()}
        report = Report(output, logs, found, [])
        if kit:
            report.add(kit["row"])
        for number, step in enumerate(steps(kit.get("manifest")), 1):
            report.add(take(step, logs / f"{number:02}.log", ends))
    print(", ".join(f"{count} {became}" for became, count in report.counts().items()))
    return int(report.counts()["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
