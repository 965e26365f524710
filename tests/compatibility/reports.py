"""The lines that ranks write: which test started, which ended and how, and that all did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STARTED, ENDED, FINISHED = "started", "ended", "finished"


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
            event: `STARTED`, `ENDED`, or `FINISHED` after the last test.
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

    def ended(self) -> list[dict[str, Any]]:
        """Return the lines of tests that have a verdict."""
        return [line for line in self.lines() if line["event"] == ENDED]

    def unfinished(self) -> list[str]:
        """Return the tests that started and did not end."""
        ended = {line["test"] for line in self.ended()}
        started = {line["test"] for line in self.lines() if line["event"] == STARTED}
        return sorted(started - ended)

    def finished(self) -> bool:
        """Return whether a launch has come behind the last test."""
        return any(line["event"] == FINISHED for line in self.lines())
