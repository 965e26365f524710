"""What each rank runs: every `case_*` function of one file, in order, all ranks together.

A case that has nothing to check on so few ranks says so by `pytest.skip(why)`, on all of them.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import traceback
from pathlib import Path

import pytest

faulthandler.dump_traceback_later(440, exit=True)  # shows where a stuck rank stands


def main() -> None:
    """Run `worker.py CASES DIRECTORY`."""
    modules = [importlib.import_module(name) for name in sys.argv[1].split("+")]
    module = modules[0]
    hvd = module.hvd
    module.start()
    report = Path(sys.argv[2], f"rank-{hvd.rank()}.jsonl")
    cases = {
        name: case
        for part in modules
        for name, case in vars(part).items()
        if name.startswith("case_")
    }
    for name, case in cases.items():
        error, skipped, result = "", "", None
        try:
            result = case()
        except pytest.skip.Exception as skip:
            skipped = str(skip)
        except (Exception, pytest.fail.Exception):
            error = traceback.format_exc()
        with report.open("a") as file:
            verdict = {"case": name, "error": error, "skipped": skipped}
            file.write(json.dumps({**verdict, "result": result}) + "\n")
        module.align()
    hvd.shutdown()


if __name__ == "__main__":
    main()
