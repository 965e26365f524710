"""The monitor without a framework: it requests records, sums them over the ranks, writes them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from adasum_hvd.base import ops
from adasum_hvd.base.agreement import compare_settings, refuse_elastic
from adasum_hvd.base.options import check_count
from adasum_hvd.monitor.noise import noise_of
from adasum_hvd.monitor.sinks import SUMMARY, Record, Sinks
from adasum_hvd.monitor.statistics import DEGREES, Rows, TensorRecord, statistics, width

# The names of a tensor's segments, by the tensor's name in the engine.
Entries = Mapping[str, Sequence[str]]
_numbers = itertools.count()


class Channel(Protocol):
    """The functions of a framework that a monitor uses."""

    rank: int  # this rank, numbered in the job
    ranks: Sequence[int]  # the ranks that reduce

    def request_record(self, entry: str) -> None:
        """Request a record of the next reduction of a tensor."""

    def latest_record(self, entry: str) -> TensorRecord | None:
        """Return the latest record of a tensor, or None if there is none."""

    def gather(self, obj: Any) -> list[Any]:
        """Return every rank's object. Collective; blocks."""

    def start_sum(self, rows: Rows, name: str) -> Callable[[bool], Rows | None]:
        """Start to sum `rows` over the ranks; return a function of `wait`. Collective.

        It returns the sum, or without `wait` None while the sum is not finished.
        """


def check_job(settings: Mapping[str, object]) -> None:
    """Raise NotImplementedError in an elastic job, and RuntimeError if the op is off."""
    refuse_elastic("AdasumMonitor")
    if settings["op"] == "off":
        raise RuntimeError(
            "AdasumMonitor: expected the AdaSum op, but got ADASUM_HVD_OP=off; unset it on all "
            "ranks"
        )


def inputs_of(op: ops.ReduceOp) -> str:
    """Return what an AdaSum op reduces: "gradients", or "changes" of weights; else ValueError."""
    if not ops.is_adasum(op):
        raise ValueError(
            "AdasumMonitor: expected an optimizer with an AdaSum op, but got "
            f"op={op.name}; pass op=AdasumGrad or op=AdasumDelta to DistributedOptimizer"
        )
    return "gradients" if op is ops.AdasumGrad else "changes"


# The names of a tensor's segments among the summed rows, and their levels' sizes.
_Segments = tuple[Sequence[str], tuple[int, ...]]


class _Pending(NamedTuple):
    """A record whose sum over the ranks has started."""

    step: int
    parts: list[_Segments]
    loss_scale: float
    finish_sum: Callable[[bool], Rows | None]


class Monitor:
    """Requests a record of every k-th step, sums it over the ranks, and passes it to the sinks.

    A reduction leaves the record of a segment on the rank that solved it, and zeros on all others.
    One Sum of a few doubles per tensor collects them; ranks that have joined contribute zeros.

    Args:
        every: steps between two records.
        to: see :class:`Sinks`; used on the first rank only.
        channel: the connection to the other ranks.
        inputs: as :func:`inputs_of`.
        loss_scale: returns the factor of the last gradients, by which their norms are divided.

    Raises:
        ValueError, TypeError: `every` is not an integer of at least 1 or differs between ranks,
            or `to` is invalid on the first rank; on every rank.

    Collective: all ranks of the channel; blocks.
    """

    def __init__(
        self,
        every: int,
        to: Any,
        channel: Channel,
        inputs: str = "gradients",
        loss_scale: Callable[[], float] = lambda: 1.0,
    ):
        self._every, self._channel, self._inputs = every, channel, inputs
        self._loss_scale = loss_scale
        self._sinks, error = None, None
        try:
            check_count("every", every)
            self._sinks = Sinks(to) if channel.rank == channel.ranks[0] else None
        except (TypeError, ValueError, OSError) as raised:
            error = raised
        self._name = f"adasum.monitor.{self._agree(error)}"
        self._steps = 0
        self._due = every == 1
        # By requested entry, the number of its latest record before the request.
        self._requested: dict[str, int] = {}
        self._segments_of: Entries = {}
        self._pending: _Pending | None = None

    def _agree(self, error: Exception | None) -> int:
        """Compare the arguments, and return the monitor's number. Collective."""
        failure = None if error is None else (type(error), str(error))
        gathered = self._channel.gather((failure, self._every, next(_numbers)))
        failures, intervals, numbers = zip(*gathered, strict=True)
        rank, ranks = self._channel.rank, self._channel.ranks
        for other, failed in zip(ranks, failures, strict=True):
            if failed is not None:
                kind, text = failed
                raise kind(
                    f"AdasumMonitor: {text} (on rank {other}, seen by rank {rank})"
                )
        words = "arguments of AdasumMonitor", "pass the same arguments on every rank"
        compare_settings([{"every": k} for k in intervals], rank, *words, ranks)
        return max(numbers)

    def after_step(
        self, entries_of: Callable[[], Entries], step: int | None = None
    ) -> None:
        """Count a step, and collect its record if one was requested.

        `entries_of` returns the tensors that the next step will reduce, equal on all ranks. A
        record has the number `step`, by default the number of calls. Collective on the steps with
        a record; blocks only while an earlier record is pending.
        """
        self._steps += 1
        self._deliver(wait=False)
        self._due |= (self._steps + 1) % self._every == 0
        if not (self._due or self._requested):
            return
        entries = entries_of()
        if self._requested:
            if dict(self._segments_of) != dict(entries):
                self._due = True  # other tensors now: some were frozen, for example
            elif not self._collect(self._steps if step is None else step):
                return
        if self._due and entries:
            self._request(entries)

    def request_first(self, entries_of: Callable[[], Entries]) -> None:
        """Request a record of the first step, if it is due and its tensors are known."""
        if self._due and (entries := entries_of()):
            self._request(entries)

    def _request(self, entries: Entries) -> None:
        self._due = False
        self._segments_of, self._requested = dict(entries), {}
        for entry in entries:
            latest = self._channel.latest_record(entry)
            self._requested[entry] = latest.number if latest else 0
            self._channel.request_record(entry)

    def _collect(self, step: int) -> bool:
        """Start to sum the requested records; return False if one does not exist yet."""
        parts, rows = [], []
        for entry, number_before in self._requested.items():
            record = self._channel.latest_record(entry)
            if record is None or record.number <= number_before:
                return False
            names = self._segments_of[entry]
            parts.append((names, record.sizes))
            rows.append(record.rows[: len(names) * width(record.sizes)])
        self._requested = {}
        self._deliver(wait=True)
        finish_sum = self._channel.start_sum(np.concatenate(rows), self._name)
        self._pending = _Pending(step, parts, self._loss_scale(), finish_sum)
        return True

    def _deliver(self, wait: bool) -> None:
        if self._pending is None:
            return
        step, parts, loss_scale, finish_sum = self._pending
        total = finish_sum(wait)
        if total is None:
            return
        self._pending = None
        if self._sinks is not None:
            record: Record = {
                "step": step,
                "time": time.time(),
                "ranks": len(self._channel.ranks),
                "joined": math.prod(parts[0][1]),
                "inputs": self._inputs,
                "tensors": _tensors(parts, total, loss_scale),
            }
            self._sinks(record | _summary(record))

    def close(self) -> None:
        """Write the pending record, and close the sinks. Collective; blocks."""
        self._deliver(wait=True)
        self._requested = {}
        if self._sinks is not None:
            self._sinks.close()


def _tensors(parts: Sequence[_Segments], total: Rows, loss_scale: float) -> Record:
    """Return the statistics by tensor in model order, which is the reverse of bucket order."""
    tensors: Record = {}
    for names, sizes in parts:
        rows, total = np.split(total, [len(names) * width(sizes)])
        columns = statistics(rows.reshape(len(names), -1), sizes)
        for key, power in DEGREES.items():
            columns[key] = columns[key] / loss_scale**power
        for index, name in enumerate(names):
            values = {key: _plain(column[index]) for key, column in columns.items()}
            if values["orthogonality"] is not None:  # else zero on all ranks
                tensors[name] = values
    return dict(reversed(tensors.items()))


def _summary(record: Record) -> Record:
    """Return the record's noise over all tensors; None if it has no tensor."""
    try:
        values = noise_of([record]).summary()
    except ValueError:
        return dict.fromkeys(SUMMARY)
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: float) -> float | None:
    """Return a number for JSON, rounded to float32's digits; None if it is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
