"""Reads the JSON-lines files that a monitor writes."""

from __future__ import annotations

import json
import numbers
import operator
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WRONG = ValueError, KeyError, TypeError, AttributeError, OverflowError


def check(record: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if this is no record of a monitor; `where` is its place, for the message."""
    try:
        counts = {"joined": record["joined"], "ranks": record.get("ranks") or 1}
        for name, value in counts.items():
            if operator.index(value) < 1:
                raise ValueError(f"{name}={value!r}")
        for tensor in record["tensors"].values():
            for name, value in tensor.items():
                if not (value is None or isinstance(value, numbers.Real)):
                    raise ValueError(f"{name}={value!r}")
                float(value or 0)
    except _WRONG as error:
        raise _not_a_record(where, error) from error


def records(file: Path) -> list[dict[str, Any]]:
    """Return the records of the latest run in a file, to which every run appends.

    A run ends where the step does not rise, where the number of inputs or ranks changes, or with a
    line that is not JSON, which was cut when its run was killed. An unterminated last line is
    ignored: a run may still be writing it. A run that begins with the step of the record before it
    warns, because its steps may have been counted wrongly. Raises OSError, or ValueError if the
    file has no records, or a line is not a record.
    """
    found: list[dict[str, Any]] = []
    repeats = False  # whether the latest run begins with the step before it
    cut: ValueError | None = None
    for number, line in enumerate(file.read_text().splitlines(keepends=True), 1):
        if not line.strip():
            continue
        where = f"line {number} of {file}"
        try:
            record = json.loads(line)
        except ValueError as error:
            if line.endswith("\n"):
                found, repeats = [], False
                cut = cut or _not_a_record(where, error)
            continue
        try:
            step = operator.index(record["step"])
            {each["orthogonality"] for each in record["tensors"].values()}
        except _WRONG as error:
            raise _not_a_record(where, error) from error
        check(record, where)
        if found and (step <= found[-1]["step"] or _job(record) != _job(found[-1])):
            repeats = step == found[-1]["step"]
            found = []
        found.append(record)
    if cut and not found:
        raise cut
    if not any(record["tensors"] for record in found):
        raise ValueError(
            f"expected records of hvd.AdasumMonitor, but got none in {file}; a job of one rank "
            "records nothing"
        )
    if repeats:
        warnings.warn(
            f"{file}: the record before the latest run has its first step, {found[0]['step']}, "
            "too, and is left out with all earlier ones. If they are of one run, its steps were "
            "not counted; pass rising numbers to AdasumMonitor.step",
            stacklevel=2,
        )
    return found


def _not_a_record(where: str, error: Exception) -> ValueError:
    return ValueError(
        f"expected a record of hvd.AdasumMonitor in {where}, but got "
        f"{type(error).__name__}: {error}"
    )


def _job(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what is the same in all records of a run."""
    return tuple(record.get(name) for name in ("joined", "ranks", "inputs"))
