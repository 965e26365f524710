"""Every optimizer of eight packages, in each way that AdaSum takes: right, refused or wrong.

    pip install --editable '.[optimizers]'
    python benchmarks/optimizers.py  # writes docs/optimizers.json and .md
    python benchmarks/optimizers.py --packages timm --names lion adamw  # in an existing file

A job of two ranks walks through a package with a tiny model. A job that stops is ended, the
optimizer in it is recorded, and another job goes on with the next one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jobs
import optimizer_list
import optimizer_page
from optimizer_trial import ENGINES, RANKS, ROUNDINGS

TRIAL = str(jobs.REPOSITORY / "benchmarks/optimizer_trial.py")
OUTPUT = jobs.REPOSITORY / "docs/optimizers.json"
STALL_SECONDS, GRACE_SECONDS = 60, 40


def _words(engine: str) -> list[str]:
    if engine == "torchrun":
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(RANKS), TRIAL),
        ]
    if engine == "gloo":
        return [*jobs.launcher("exec", RANKS), sys.executable, TRIAL]
    return [sys.executable, TRIAL]


def _run(engine: str, package: str, items: Sequence[Any], output: Path) -> str:
    """Run a job until it ends or stalls; return how it ended."""
    environment = {
        **os.environ,
        "PATH": jobs.search_path(),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes minutes, and is not what is tried
    }
    words = [*_words(engine), engine, package, json.dumps(items), str(output)]
    with output.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            words, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.time() - output.stat().st_mtime > STALL_SECONDS:
                    return "timed out"
        finally:
            if process.poll() is None:
                process.terminate()  # the launchers' ranks are in sessions of their own
                try:
                    process.wait(GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    return "crashed" if process.returncode else "ended"


def walk(engine: str, package: str, items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a line for every item; jobs go on after an item that stops one."""
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "lines")
        while len(lines) < len(items):
            output.write_text("")
            ended = _run(engine, package, items[len(lines) :], output)
            found = [json.loads(line) for line in output.read_text().splitlines()]
            results = [line for line in found if "begins" not in line]
            begun = [line["begins"] for line in found if "begins" in line]
            if len(begun) > len(results):
                results.append({"package": package, "name": begun[-1], "error": ended})
            elif not results:
                shown = output.with_suffix(".log").read_text()
                raise RuntimeError(f"{engine}, {package}: {ended}: {shown[-3000:]}")
            lines += results
            print(f"{engine} {package}: {len(lines)} of {len(items)}", flush=True)
    return lines


def trial(package: str, only: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a package's optimizers, or of those with the names."""
    names = optimizer_list.names_of(package)
    names = [name for name in names if name in only or not only]
    cases = walk("survey", package, names) if names else []
    rows = [dict(case) for case in cases]
    running = [row for row in rows if "error" not in row]
    for engine in ENGINES:
        given = [case for case in cases if "error" not in case]
        for row, line in zip(running, walk(engine, package, given), strict=True):
            for way in ENGINES[engine]:
                stopped = {"verdict": f"unclear: {line.get('error')}"}
                found = line.get("ways", {}).get(way, stopped)
                row.setdefault("ways", {})[way] = _short(found)
    return rows


def _short(found: dict[str, Any]) -> Any:
    """Return what the page needs: numbers and messages only of what is not right."""
    is_expected = found["verdict"] == "right" or found["verdict"].startswith("refused")
    return found["verdict"] if is_expected else found


def main() -> None:
    """Try optimizers; write what was found, over earlier results of the same ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(optimizer_list.MODULES)
    parser.add_argument("--packages", nargs="+", choices=names, default=names)
    parser.add_argument("--names", nargs="*", default=[], help="of optimizers; all")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    output, found = arguments.output, {"rows": [], "versions": {}}
    if output.exists():
        found = json.loads(output.read_text())
    rows = {(row["package"], row["name"]): row for row in found["rows"]}
    for package in arguments.packages:
        new = trial(package, arguments.names)
        rows |= {(row["package"], row["name"]): row for row in new}
        found["versions"][package] = metadata.version(package)
        found |= {
            "rows": [rows[one] for one in sorted(rows)],
            "roundings": ROUNDINGS,
            "date": datetime.date.today().isoformat(),
        }
        output.write_text(optimizer_page.encoded(found))
        output.with_suffix(".md").write_text(optimizer_page.page(found))


if __name__ == "__main__":
    main()
