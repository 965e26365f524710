"""Every finished run is one line of JSON in docs/convergence/raw, and is not run again."""

from __future__ import annotations

import fcntl
import functools
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jobs

from convergence.changing import train_changing
from convergence.target import train_to_target
from convergence.training import Setting, is_trained, train
from convergence.workloads import workload

_FIELDS = {field.name: field.default for field in fields(Setting)}


def setting_of(record: dict[str, Any]) -> Setting:
    """Return the setting of a line; a field that it does not name has its default."""
    return Setting(**{name: record[name] for name in _FIELDS if name in record})


def make(setting: Setting) -> dict[str, Any]:
    """Return the record of a new run."""
    if setting.phases:
        return train_changing(setting)
    return train_to_target(setting) if setting.target else train(setting).record


def complete(text: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a raw file; a last line that a killed run left unfinished is none."""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line to a raw file, in place of one that a killed run left unfinished."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(record).encode() + b"\n")


class Runs:
    """The runs in a folder. New ones are appended to one file of it."""

    def __init__(self, folder: Path, name: str, only_kept: bool = False) -> None:
        """`only_kept`: a missing run stays missing, and its record is None."""
        self._folder, self._path = folder, folder / f"{name}.jsonl"
        self._only_kept = only_kept
        self._kept: dict[str, dict[str, Any]] = {}
        self._sizes: dict[Path, int] = {}
        self.refresh()

    def get(self, setting: Setting) -> dict[str, Any] | None:
        """Return the record of a run, which is run now if it has none."""
        self.refresh()
        if setting.key not in self._kept and not self._only_kept:
            self.add(setting, make(setting))
        return self._kept.get(setting.key)

    def add(self, setting: Setting, record: dict[str, Any]) -> None:
        """Keep the record of a new run."""
        record["machine"] = _machine()
        self._folder.mkdir(parents=True, exist_ok=True)
        append(self._path, record)
        self._kept[setting.key] = record
        print(
            f"{record['seconds']:6.1f} s {setting.key}: {_outcome(record)}", flush=True
        )

    def find(self, setting: Setting) -> dict[str, Any] | None:
        """Return the record of a run; None if it was not run."""
        return self._kept.get(setting.key)

    def best_rate(self, setting: Setting, grid: tuple[float, ...]) -> float | None:
        """Return the rate of the grid with the best validation score at seed 1.

        None if a run of the grid is missing, or if no rate trained. Of some earlier
        choices (rate 0, "chosen") only the result was kept.
        """
        work = workload(setting.work, setting.split)
        split = "validation" if work.separate_validation else setting.split
        self.refresh()
        choice = replace(setting, lr=0.0, seed=1, split=split).key
        if choice in self._kept:
            return self._kept[choice]["chosen"]
        scores = {}
        for lr in grid:
            record = self.get(replace(setting, lr=lr, seed=1, split=split))
            if record is None:
                return None
            if is_trained(record):
                scores[lr] = work.score(record)
        return min(scores, key=lambda lr: scores[lr]) if scores else None

    def all(self) -> list[dict[str, Any]]:
        """Return every run in the folder."""
        self.refresh()
        return list(self._kept.values())

    def refresh(self) -> None:
        """Read the lines that another process may have added."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if path.stat().st_size == self._sizes.get(path):
                continue
            self._sizes[path] = path.stat().st_size
            for record in complete(path.read_text()):
                self._kept.setdefault(setting_of(record).key, record)


@functools.cache
def _machine() -> dict[str, Any]:
    found = jobs.machine()
    return {name: found[name] for name in ("processor", "cores", "python", "torch")}


def _outcome(record: dict[str, Any]) -> str:
    names = ("validation", "test", "accuracy", "level", "steps_to_target", "diverged")
    return ", ".join(f"{name} {record[name]}" for name in names if name in record)
