"""What each rank runs: every `case_*` function of one file, in order, all ranks together.

A case that has nothing to check on so few ranks says so by `pytest.skip(why)`, on all of them.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import pytest

CASES = "tests.parallel.cases"
# A rank that is stuck shows where it stands, and ends.
CASE_SECONDS = int(os.environ.get("ADASUM_CASE_SECONDS", "240"))


def main() -> None:
    """Run `python -m tests.parallel.harness.worker CASES DIRECTORY [CASE ...]`."""
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
    files, directory, *only = sys.argv[1:]
    modules = [importlib.import_module(f"{CASES}.{name}") for name in files.split("+")]
    hvd = modules[0].hvd
    # A file may say how to initialize, what to do then, and how to come together after a case.
    getattr(modules[0], "init", hvd.init)()
    for start in dict.fromkeys(getattr(module, "start", None) for module in modules):
        if start is not None:
            start()
    align = getattr(modules[0], "align", None) or hvd.barrier
    report = Path(directory, f"rank-{hvd.rank()}.jsonl")
    cases = {
        name: case
        for module in modules
        for name, case in vars(module).items()
        if name.startswith("case_") and (not only or name in only)
    }
    for name, case in cases.items():
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        error, skipped, result = "", "", None
        began = time.monotonic()
        try:
            result = case()
        except pytest.skip.Exception as skip:
            skipped = str(skip)
        except (Exception, pytest.fail.Exception):
            error = traceback.format_exc()
        with report.open("a") as file:
            verdict = {"case": name, "error": error, "skipped": skipped}
            verdict |= {"result": result, "seconds": time.monotonic() - began}
            file.write(json.dumps(verdict) + "\n")
        align()
    hvd.shutdown()


if __name__ == "__main__":
    main()
