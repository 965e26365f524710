"""`adasum-hvd timeline`: sum up a timeline of Horovod (`HOROVOD_TIMELINE`) of any length.

Tensors that are reduced together are in the same phase at the same time. The time of a phase is
therefore the time during which at least one tensor was in it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

_BYTES = {
    "uint8": 1, "int8": 1, "bool": 1, "uint16": 2, "int16": 2, "float16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip


class TimelineError(ValueError):
    """A file that is not a timeline."""


@dataclass
class Phase:
    """Totals of a phase, over the tensors that went through it."""

    name: str
    count: int = 0
    microseconds: int = 0  # during which at least one tensor was in it
    bytes: int = 0  # of those tensors whose size the file has
    inside: int = 0  # tensors whose end the file does not have
    _since: int = 0

    def begin(self, at: int) -> None:
        """Count a tensor that enters."""
        if not self.inside:
            self._since = at
        self.inside += 1
        self.count += 1

    def end(self, at: int) -> None:
        """Count a tensor that leaves."""
        self.inside -= 1
        if not self.inside:
            self.microseconds += at - self._since


@dataclass
class _Tensor:
    """The phases that a tensor is in, outermost first, and all phases since the outermost began."""

    open: list[Phase] = field(default_factory=list)
    passed: list[Phase] = field(default_factory=list)


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "timeline", help="sum up a timeline of Horovod's by phase"
    )
    parser.add_argument("file", type=Path, help="the file that HOROVOD_TIMELINE names")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    parser.set_defaults(run=run, errors=(OSError, TimelineError))


def run(arguments: argparse.Namespace) -> None:
    """Print the table."""
    path = arguments.file
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            phases, microseconds = summed(events(file))
        if not phases:
            raise TimelineError(
                "expected operations, but the file has none; let the job reach its first one"
            )
    except TimelineError as error:
        raise TimelineError(f"{path}: {error}") from None
    show = as_json if arguments.json else table
    print(show(phases, microseconds))
    if is_cut(path) or any(phase.inside for phase in phases):
        print(
            f"adasum-hvd timeline: {path}: the file is cut: the job was killed, still runs, or "
            "ended before Horovod had written everything; these are the events before that",
            file=sys.stderr,
        )


def is_cut(path: Path) -> bool:
    """Return whether a timeline lacks its end, which Horovod writes after each event."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return not file.read().rstrip().endswith(b"]")


def events(file: TextIO, chunk: int = 1 << 16) -> Iterator[dict[str, Any]]:
    """Yield the events of a timeline, without an incomplete one at its end.

    The file is read in chunks of characters, because Horovod writes few line ends or none.
    """
    rest, read = "", 0
    while piece := file.read(chunk):
        text = rest + piece if rest else piece.lstrip().removeprefix("[")
        end = text.rfind("},") + 1
        if end:
            yield from _parsed(text[:end], read)
            text = text[end + 1 :]
        elif len(text) > 2 * chunk:
            raise TimelineError(f"expected events in JSON, but got {text[:60]!r}")
        rest, read = text or " ", read + len(piece)
    last = rest.strip().removesuffix("]").strip()
    if last.endswith("}"):
        yield from _parsed(last, read)
    elif last and not last.startswith("{"):
        raise TimelineError(f"expected events in JSON, but got {last[:60]!r}")


def _parsed(text: str, read: int) -> list[dict[str, Any]]:
    try:
        found = json.loads(f"[{text}]")
    except ValueError as error:
        raise TimelineError(
            f"expected events in JSON after character {read}, but got {error}"
        ) from None
    if not all(isinstance(event, dict) for event in found):
        raise TimelineError(f"expected events in JSON after character {read}")
    return found


def summed(found: Iterable[dict[str, Any]]) -> tuple[list[Phase], int]:
    """Return the phases, longest first, and the microseconds between first and last event."""
    phases: dict[str, Phase] = {}
    tensors: dict[int, _Tensor] = {}
    first = last = None
    for event in found:
        if event.get("ph") not in ("B", "E"):
            continue
        try:
            at, tensor = int(event["ts"]), tensors.setdefault(event["pid"], _Tensor())
        except (KeyError, TypeError, ValueError):
            raise TimelineError(f"expected ts and pid in {event!s:.80}") from None
        first, last = at if first is None else first, at
        if event["ph"] == "B":
            name = str(event.get("name"))
            phase = phases.setdefault(name, Phase(name))
            phase.begin(at)
            tensor.open.append(phase)
            tensor.passed.append(phase)
        elif tensor.open:
            tensor.open.pop().end(at)
            if not tensor.open:
                _measure(tensor, event.get("args", {}))
                del tensors[event["pid"]]  # unnamed tensors never return
    ordered = sorted(phases.values(), key=lambda phase: -phase.microseconds)
    return ordered, (last or 0) - (first or 0)


def _measure(tensor: _Tensor, arguments: dict[str, str]) -> None:
    """Add a tensor's bytes, which the end of its outermost phase has, to all its phases."""
    if "shape" in arguments:
        shape = map(int, re.findall(r"\d+", arguments["shape"]))
        total = math.prod(shape) * _BYTES.get(str(arguments.get("dtype")), 0)
        for phase in tensor.passed:
            phase.bytes += total


def table(phases: list[Phase], microseconds: int) -> str:
    """Return a table: phase, count, time, share of the whole time, bytes per second."""
    lines = [f"{'phase':32s} {'count':>9s} {'total s':>10s} {'share':>7s} {'GB/s':>8s}"]
    for phase in phases:
        share = phase.microseconds / max(1, microseconds)
        rate = ""
        if phase.bytes and phase.microseconds:
            rate = f"{phase.bytes / phase.microseconds / 1e3:8.2f}"
        lines.append(
            f"{phase.name:32s} {phase.count:9d} {phase.microseconds / 1e6:10.3f} "
            f"{share:7.1%} {rate:>8s}"
        )
    return "\n".join(
        [*lines, f"{'first to last event':32s} {'':9s} {microseconds / 1e6:10.3f}"]
    )


def as_json(phases: list[Phase], microseconds: int) -> str:
    """Return the same as JSON, times in microseconds."""
    names = "phase", "count", "microseconds", "bytes"
    rows = ((one.name, one.count, one.microseconds, one.bytes) for one in phases)
    listed = [dict(zip(names, row, strict=True)) for row in rows]
    return json.dumps({"microseconds": microseconds, "phases": listed}, indent=1)
