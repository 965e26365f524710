"""The lines that ranks write: which test started, which ended and how."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DONE = "done.json"  # the tests that earlier launches ran
READY, STARTED, ENDED, FINISHED = "ready", "started", "ended", "finished"


class Report:
    """One rank's file of JSON lines."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = directory / f"rank-{rank}.jsonl"

    def write(
        self,
        event: str,
        test: str = "",
        parts: Mapping[str, str] | None = None,
        why: str = "",
    ) -> None:
        """Append a line.

        Args:
            event: `READY` before the first test of a launch, `STARTED`, `ENDED`, `FINISHED`.
            test: pytest's name of it.
            parts: the outcome of the test itself ("") and of its sub-tests.
            why: tracebacks.
        """
        line = {"event": event, "test": test, "parts": dict(parts or {}), "why": why}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """Return what is there; a line that is being written is not."""
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in whole.splitlines()]

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of one event."""
        return [line for line in self.lines() if line["event"] == event]

    def unfinished(self) -> list[str]:
        """Return the tests that started and did not end."""
        started = {line["test"] for line in self.of(STARTED)}
        return sorted(started - {line["test"] for line in self.of(ENDED)})
