"""Every finished run is one line of JSON in docs/convergence/raw, and is not run again."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jobs

from convergence.training import Setting, is_trained, train
from convergence.workloads import workload

_FIELDS = {field.name: field.default for field in fields(Setting)}


def setting_of(record: dict[str, Any]) -> Setting:
    """Return the setting of a line; a field that it does not name has its default."""
    return Setting(**{name: record[name] for name in _FIELDS if name in record})


class Runs:
    """The runs in a folder. New ones are appended to one file of it."""

    def __init__(self, folder: Path, name: str, only_kept: bool = False) -> None:
        """`only_kept`: what is not there stays None, and is not run."""
        self._folder, self._path = folder, folder / f"{name}.jsonl"
        self._only_kept = only_kept
        self._kept: dict[str, dict[str, Any]] = {}
        self._sizes: dict[Path, int] = {}

    def get(self, setting: Setting) -> dict[str, Any] | None:
        """Return the record of a run, which is made now if there is none."""
        self._read()
        if setting.key not in self._kept and not self._only_kept:
            record = train(setting).record
            record["machine"] = self._machine()
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            self._kept[setting.key] = record
            print(
                f"{record['seconds']:6.1f} s {setting.key}: {_outcome(record)}",
                flush=True,
            )
        return self._kept.get(setting.key)

    def best_rate(self, setting: Setting, grid: tuple[float, ...]) -> float | None:
        """Return the rate of the grid with the best validation score at seed 1.

        None where a run of the grid is missing, or where no rate trained. Of some earlier
        choices (rate 0, "chosen") only the result was kept.
        """
        work = workload(setting.work, setting.split)
        split = "validation" if work.separate_validation else setting.split
        self._read()
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
        self._read()
        return list(self._kept.values())

    def _read(self) -> None:
        """Read what another process may have added."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if path.stat().st_size == self._sizes.get(path):
                continue
            self._sizes[path] = path.stat().st_size
            for line in path.read_text().splitlines():
                record = json.loads(line)
                self._kept.setdefault(setting_of(record).key, record)

    def _machine(self) -> dict[str, Any]:
        found = jobs.machine()
        return {name: found[name] for name in ("processor", "cores", "python", "torch")}


def _outcome(record: dict[str, Any]) -> str:
    names = ("validation", "test", "accuracy", "diverged")
    return ", ".join(f"{name} {record[name]}" for name in names if name in record)
