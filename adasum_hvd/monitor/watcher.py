"""When the op is asked for what it finds, and how that comes together on one rank."""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from adasum_hvd.common import binding, ops
from adasum_hvd.common.agreement import compare_settings, refuse_elastic
from adasum_hvd.common.options import check_count
from adasum_hvd.monitor.sinks import Record, Sinks
from adasum_hvd.monitor.statistics import Rows, statistics, width

Entries = Mapping[
    str, Sequence[str]
]  # names of segments, by the tensor's name in Horovod
_numbers = itertools.count()


class Channel(Protocol):
    """What a watcher needs of a framework."""

    library: ctypes.CDLL
    rank: int  # this one, in the job
    ranks: Sequence[int]  # those that reduce

    def gather(self, obj: Any) -> list[Any]:
        """Return every rank's object. Collective; blocks."""

    def start_sum(self, rows: Rows, name: str) -> Callable[[bool], Rows | None]:
        """Begin to add up over the ranks. Collective.

        Returns:
            What waits for the sum if told to, and otherwise returns None where it is not there.
        """


def check_job(settings: Mapping[str, object]) -> None:
    """Check that this job can have a monitor.

    Args:
        settings: of the op, :func:`adasum_hvd.common.binding.settings`.

    Raises:
        NotImplementedError: an elastic job.
        RuntimeError: `ADASUM_HVD_OP=off`.
    """
    refuse_elastic("AdasumMonitor")
    if settings["op"] == "off":
        raise RuntimeError(
            "AdasumMonitor: required the AdaSum op, got ADASUM_HVD_OP=off; unset it on all ranks"
        )


def check_op(op: ops.ReduceOp) -> None:
    """Raise ValueError unless an optimizer's op is one of AdaSum's."""
    if not ops.is_adasum(op):
        raise ValueError(
            f"AdasumMonitor: required an optimizer with an AdaSum op, got op={op.name}; it tells "
            "nothing of others"
        )


class _Part(NamedTuple):
    """The place of a tensor of Horovod's in what is added up."""

    names: Sequence[str]
    sizes: tuple[int, ...]


class Watcher:
    """Asks for every k-th step, adds up what the ranks know, and hands it to the sinks.

    A reduction leaves what it finds of a tensor on the rank that solves it. Of a step that was
    asked for, all ranks add up rows that are zero wherever another rank knows them: one Sum of
    some doubles per tensor, which takes part in by zeros who has joined.

    Args:
        every: steps between two records.
        to: of :class:`Sinks`; it counts on the first rank only.
        channel: to the other ranks.

    Raises:
        ValueError, TypeError: `every` is no integer of at least 1, `to` is refused on the first
            rank, or the ranks' `every` differ; on every rank.

    Collective: all ranks of the channel; blocks.
    """

    def __init__(self, every: int, to: Any, channel: Channel):
        self._every, self._channel = every, channel
        self._is_first = channel.rank == channel.ranks[0]
        self._sinks, error = None, None
        try:
            check_count("every", every)
            self._sinks = Sinks(to) if self._is_first else None
        except (TypeError, ValueError) as raised:
            error = raised
        self._name = f"adasum.monitor.{self._agree(error)}"
        self._steps = 0
        self._due = every == 1
        self._asked: dict[str, int] = {}  # by entry, how often it had been observed
        self._asked_for: Entries = {}
        self._pending: tuple[int, list[_Part], Callable[[bool], Rows | None]] | None
        self._pending = None

    def _agree(self, error: Exception | None) -> int:
        """Compare the arguments, and return the monitor's number. Collective."""
        refused = None if error is None else (type(error), str(error))
        said = self._channel.gather((refused, self._every, next(_numbers)))
        refusals, everys, numbers = zip(*said, strict=True)
        rank, ranks = self._channel.rank, self._channel.ranks
        for other, refusal in zip(ranks, refusals, strict=True):
            if refusal is not None:
                kind, text = refusal
                raise kind(
                    f"AdasumMonitor: {text} (on rank {other}, this is rank {rank})"
                )
        compare_settings(
            [{"every": each} for each in everys],
            rank,
            "arguments of AdasumMonitor",
            "pass the same ones on every rank",
            ranks,
        )
        return max(numbers)

    def after_step(
        self, entries_of: Callable[[], Entries], step: int | None = None
    ) -> None:
        """Note that a step has been taken; all ranks have reduced the same in it.

        Args:
            entries_of: returns what the next step will reduce, the same on all ranks.
            step: the step's number in the record; by default it counts calls.

        Collective on the steps that were asked for; does not block there but where an earlier
        record is still on its way.
        """
        self._steps += 1
        self._deliver(wait=False)
        self._due |= (self._steps + 1) % self._every == 0
        if not (self._due or self._asked):
            return
        entries = entries_of()
        if self._asked:
            if dict(self._asked_for) != dict(entries):
                self._due = True  # they are others now: parameters were frozen, say
            elif not self._collect(self._steps if step is None else step):
                return
        if self._due and entries:
            self._ask(entries)

    def ask_first(self, entries_of: Callable[[], Entries]) -> None:
        """Ask for the first step, if it is due and known what it reduces."""
        if self._due and (entries := entries_of()):
            self._ask(entries)

    def _ask(self, entries: Entries) -> None:
        self._due = False
        self._asked_for, self._asked = dict(entries), {}
        for entry in entries:
            latest = binding.observation(self._channel.library, entry)
            self._asked[entry] = latest.number if latest else 0
            binding.observe(self._channel.library, entry)

    def _collect(self, step: int) -> bool:
        """Begin to add up what was asked for; False where it has not been reduced yet."""
        parts, rows = [], []
        for entry, before in self._asked.items():
            found = binding.observation(self._channel.library, entry)
            if found is None or found.number <= before:
                return False
            names = self._asked_for[entry]
            parts.append(_Part(names, found.sizes))
            rows.append(found.rows[: len(names) * width(found.sizes)])
        self._asked = {}
        self._deliver(wait=True)
        sum_of = self._channel.start_sum(np.concatenate(rows), self._name)
        self._pending = step, parts, sum_of
        return True

    def _deliver(self, wait: bool) -> None:
        if self._pending is None:
            return
        step, parts, sum_of = self._pending
        total = sum_of(wait)
        if total is None:
            return
        self._pending = None
        if self._sinks is not None:
            tensors = _tensors(parts, total)
            self._sinks(
                {
                    "step": step,
                    "time": time.time(),
                    "ranks": len(self._channel.ranks),
                    "joined": math.prod(parts[0].sizes),
                    "tensors": tensors,
                }
            )

    def close(self) -> None:
        """Hand over what is on its way, and close the sinks. Collective; blocks."""
        self._deliver(wait=True)
        self._asked = {}
        if self._sinks is not None:
            self._sinks.close()


def _tensors(parts: Sequence[_Part], total: Rows) -> Record:
    """Return the statistics by tensor, in the order of the model: the last travels first."""
    tensors = {}
    begin = 0
    for names, sizes in parts:
        count = len(names)
        end = begin + count * width(sizes)
        found = statistics(total[begin:end].reshape(count, -1), sizes)
        begin = end
        for index, name in enumerate(names):
            values = {what: _plain(column[index]) for what, column in found.items()}
            if values["orthogonality"] is not None:  # else no rank has had anything
                tensors[name] = values
    return dict(reversed(tensors.items()))


def _plain(value: float) -> float | None:
    """Return a number for JSON, in the digits of float32."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
