"""The program of each rank: the cases of some files, in order, all ranks together.

    python -m tests.parallel.harness.worker torch.test_ops+torch.test_fuzz FOLDER [CASE ...]

A case that has nothing to check on so few ranks calls `pytest.skip(reason)`, on all of them.
The first file may define how ranks start (`init`), come together after a case (`align`), end
(`shutdown`) and are numbered (`rank`); what it does not define is its `hvd`'s. Every file may
define a `start` for what its cases share.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.parallel.harness.cases import PACKAGE, Case, cases_in

# A rank that is stuck shows where it stands, and ends.
CASE_SECONDS = int(os.environ.get("ADASUM_CASE_SECONDS", "240"))

TEMPORARY = "temporary"  # in FOLDER: what cases write ends with their job


def main(files: str, folder: str, *chosen: str) -> None:
    """Run the chosen cases of some files, or all of them, and report to FOLDER/rank-R.jsonl."""
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("error", category=category, module=r"adasum_hvd\b")
    temporary = Path(folder, TEMPORARY)
    temporary.mkdir(exist_ok=True)
    tempfile.tempdir = str(temporary)
    # By rank; torchrun's jobs act them.
    if hosts := os.environ.get("ADASUM_TEST_HOST_OF"):
        os.environ["ADASUM_HVD_HOSTNAME"] = hosts[int(os.environ["RANK"])]
    modules = {
        name: importlib.import_module(f"{PACKAGE}.{name}") for name in files.split("+")
    }
    first = next(iter(modules.values()))
    _of(first, "init")()
    starts = [getattr(module, "start", None) for module in modules.values()]
    for start in filter(None, dict.fromkeys(starts)):
        start()
    align = _of(first, "align", "barrier")
    report = Path(folder, f"rank-{_of(first, 'rank')()}.jsonl")
    known = {str(case): case for name in modules for case in cases_in(name)}
    gc.freeze()  # cases that collect garbage need not walk all of a framework's objects
    for case in _select(known, chosen):
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        path = f"tests/parallel/cases/{case.file.replace('.', '/')}.py"
        os.environ["PYTEST_CURRENT_TEST"] = f"{path}::{case.name} (call)"
        verdict = run(getattr(modules[case.file], case.function), case)
        with report.open("a") as file:
            file.write(json.dumps({"case": str(case)} | verdict) + "\n")
        align()
    _of(first, "shutdown")()


def run(function: Callable, case: Case) -> dict[str, Any]:
    """Return what a case returned or raised, and how long it took."""
    error, skipped, result = "", "", None
    began = time.monotonic()
    try:
        result = function(**case.arguments)
    except pytest.skip.Exception as skip:
        skipped = str(skip)
    except (Exception, pytest.fail.Exception):
        error = traceback.format_exc()
    seconds = time.monotonic() - began
    return {"error": error, "skipped": skipped, "result": result, "seconds": seconds}


def _of(module: ModuleType, name: str, of_hvd: str = "") -> Callable:
    """Return a function of a file, or that of its `hvd`."""
    return getattr(module, name, None) or getattr(module.hvd, of_hvd or name)


def _select(known: dict[str, Case], chosen: tuple[str, ...]) -> list[Case]:
    """Return the cases with these full or short names, in the order of the names."""
    if not chosen:
        return list(known.values())
    return [
        case
        for name in chosen
        for case in known.values()
        if name in (str(case), case.name, case.function)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
