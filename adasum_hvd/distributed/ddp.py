"""AdaSum under torch's DistributedDataParallel: a communication hook without Horovod.

Buckets are reduced in place, and every parameter keeps coefficients of its own: the gradients are
those of `adasum_all_reduce`, bit for bit, for any buckets. On a CPU a thread reduces buckets while
backward runs, and the last bucket's hook waits for it. On other devices the reductions are queued
on a stream, and nothing waits for a value.

No `from __future__ import annotations` here, because DDP checks the hooks' annotations.

References:
    arXiv 2006.02924, section 3; docs/distributed.md.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adasum_hvd.base.marks import is_marked_local, times_marked
from adasum_hvd.distributed import native
from adasum_hvd.distributed.checks import Call, agree, call_of
from adasum_hvd.distributed.communicator import Communicator, check_groups
from adasum_hvd.distributed.lanes import Future, Lane, lane_on, wait_quietly
from adasum_hvd.distributed.reduced import LastPass
from adasum_hvd.distributed.reduction import reduce_buffer
from adasum_hvd.distributed.rules import Coefficients, Ruled, rule_of
from adasum_hvd.distributed.sharding import shard_problem
from adasum_hvd.monitor.statistics import TensorRecord

__all__ = ["AdasumState", "Compression", "adasum_hook"]


class Compression:
    """Dtypes to which gradients are cast for the wire; the names are those of Horovod."""

    none = None
    fp16 = torch.float16
    bf16 = torch.bfloat16


class _Bucket(NamedTuple):
    parameters: list[torch.Tensor]  # kept, so that no others have their numbers
    entry: str
    sizes: tuple[int, ...]
    problem: str  # why a parameter cannot be reduced, or ""


class Records:
    """The latest record of each bucket, by its name; of `monitor.monitor.Channel`."""

    def __init__(self) -> None:
        self.requested: set[str] = set()
        self._latest: dict[str, TensorRecord] = {}

    def request(self, entry: str) -> None:
        """Request a record of the next reduction of a bucket."""
        self.requested.add(entry)

    def latest(self, entry: str) -> TensorRecord | None:
        """Return the latest record of a bucket, or None if there is none."""
        return self._latest.get(entry)

    def add(self, entry: str, found: TensorRecord) -> None:
        """Number and keep the record of a bucket's reduction, as was requested."""
        self.requested.discard(entry)
        before = self._latest.get(entry)
        number = 1 + (before.number if before else 0)
        self._latest[entry] = found._replace(number=number)


class AdasumState(Ruled):
    """The state of :func:`adasum_hook` for one DDP model.

    Args:
        process_group: DDP's, or its mesh of one dimension; by default the default one, as torch's
            own hooks: DDP does not tell the hook its group.
        compression: `Compression.fp16` or `Compression.bf16` (torch.float16 or torch.bfloat16):
            two bytes on the wire. By default gradients travel in their own dtype.
        rule: as of `adasum_all_reduce`, or "adascale": the mean, and the state has its `gain`.
        group_op, group_size: as of `adasum_all_reduce`.

    Raises:
        ValueError: an argument is not one of these, or not the same on all ranks; on every rank.
            Or this rank is not in the group.

    Collective: every rank of the group; blocks.
    """

    def __init__(
        self,
        process_group: Any = None,
        compression: torch.dtype | None = None,
        rule: str | Coefficients = "adasum",
        group_op: str | None = None,
        group_size: int | None = None,
    ):
        self.communicator = Communicator(process_group, apart=True)
        self.compression = compression
        try:
            self.rule = rule_of(rule, group_op, group_size)
            call = call_of(
                [], self.rule.described | {"compression": _name(compression)}
            )
        except ValueError as error:  # raised on all ranks below
            call = Call(problem=error)
        agree("AdasumState", call, self.communicator)
        check_groups(self.communicator, self.rule)
        self._lanes: dict[torch.device, Lane] = {}
        self._buckets: dict[tuple[int, ...], _Bucket] = {}  # by number, and parameters
        self._known: set[tuple[Any, ...]] = set()  # buckets that the ranks agree on
        self._started: list[Future] = []
        # The parameters of the buckets of this backward pass, by the bucket's name.
        self.reduced: dict[str, list[torch.Tensor]] = {}
        self._shared = native.SharedBuckets()
        self.passes = 0  # reduced; after the first one DDP makes its final buckets
        self._on_round: list[Callable[[], None]] = []
        self.records = Records()
        self._last_pass = LastPass()

    def __reduce__(self) -> Any:
        raise TypeError(
            "AdasumState: expected no copy, because a copy of DistributedDataParallel has no hook "
            "and averages gradients; copy or save the module inside it, and register the hook "
            "with a new state"
        )

    def on_round(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` after each reduced backward pass; return a function that stops it."""
        self._on_round.append(call)
        return lambda: self._on_round.remove(call)

    def _start(
        self, flat: torch.Tensor, index: int, parameters: list[torch.Tensor]
    ) -> Future:
        """Start to reduce the gradients of a bucket's parameters, concatenated, in place.

        Returns:
            A future of `flat`. On a CPU :meth:`_finish` must be called, too.
        """
        if self.communicator.size == 1 and flat.layout is torch.strided:
            return _done(flat)
        if self.rule.kind != "mean":
            self._last_pass.check(parameters)
        bucket = self._described(index, parameters)
        self.reduced[bucket.entry] = parameters
        if flat.device not in self._lanes:
            self._lanes[flat.device] = lane_on(flat.device, self.communicator)
        task = partial(self._reduce, flat, bucket, self._address(flat))
        future = self._lanes[flat.device].submit(task, [flat])
        if flat.is_cpu:
            self._started.append(future)
        return future

    def _described(self, index: int, parameters: list[torch.Tensor]) -> _Bucket:
        """Return what a bucket of these parameters is, found out once for each."""
        key = (index, times_marked(), *map(id, parameters))
        if key not in self._buckets:
            sizes = tuple(parameter.numel() for parameter in parameters)
            problem = next(filter(None, map(self._problem, parameters)), "")
            entry = f"{index}/{hash(sizes)}"
            self._buckets[key] = _Bucket(parameters, entry, sizes, problem)
        return self._buckets[key]

    def _problem(self, parameter: torch.Tensor) -> str:
        """Return why a parameter's gradient cannot be reduced over DDP's ranks, or ""."""
        if is_marked_local(parameter):
            return (
                "expected parameters that all ranks share, but got one that is marked with "
                "mark_worker_local, and DDP hands over all gradients; keep it in a module outside "
                "DistributedDataParallel"
            )
        # A mean of parts is a part of the mean.
        return "" if self.rule.kind == "mean" else shard_problem(parameter)

    def _address(self, flat: torch.Tensor) -> int | None:
        """Return the core's address of a bucket, if the core reduces it where it lies."""
        if self.passes == 0 or self.compression or not flat.is_cpu:
            return None
        choice = native.chosen(self.communicator, self.rule)
        by_core = choice is not None and choice.group is not None
        return self._shared.address(flat) if by_core else None

    def _reduce(
        self,
        flat: torch.Tensor,
        bucket: _Bucket,
        at: int | None,
        communicator: Communicator,
    ) -> torch.Tensor:
        """Reduce a bucket; runs in the lane."""
        _, entry, sizes, _ = bucket
        self._agree(flat, bucket, communicator)
        sent = flat if self.compression is None else flat.to(self.compression)
        observe = entry in self.records.requested
        record = reduce_buffer(sent, sizes, communicator, self.rule, (), at, observe)
        if record is not None:
            self.records.add(entry, record)
        if sent is not flat:
            flat.copy_(sent)
        return flat

    def _agree(
        self, flat: torch.Tensor, bucket: _Bucket, communicator: Communicator
    ) -> None:
        """Raise ValueError if a new bucket differs over the ranks, or cannot be reduced.

        DDP gives all ranks the same buckets, so that no known one is compared.
        """
        _, _, sizes, problem = bucket
        known = (flat.dtype, flat.layout, sizes, problem)
        if known not in self._known:
            call = call_of([flat], self.rule.described | {"parameters": sizes})
            if not call.problem and sum(sizes) != flat.numel():
                # DDP puts two real numbers into the bucket for each complex one.
                problem = "expected real parameters, but got a complex one"
            if problem:
                call = Call(problem=ValueError(problem))
            agree("adasum_hook", call, communicator)
            self._known.add(known)

    def _finish(self) -> None:
        """Wait for all buckets on a CPU that have been started; blocks. Errors as the hook's."""
        started, self._started = self._started, []
        try:
            for future in started:
                future.wait()
        finally:  # tasks use the gradients until they end
            for future in started:
                wait_quietly(future)


def _name(compression: object) -> str:
    names = {None: "none", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    if compression not in names:
        raise ValueError(
            "compression: expected Compression.none, Compression.fp16 or Compression.bf16, but "
            f"got {compression!r}"
        )
    return names[compression]


def _done(flat: torch.Tensor) -> Future:
    future: Future = torch.futures.Future(
        devices=None if flat.is_cpu else [flat.device]
    )
    future.set_result(flat)
    return future


def adasum_hook(
    state: AdasumState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of gradients by AdaSum, for `DistributedDataParallel.register_comm_hook`.

    Args:
        state: the model's.
        bucket: of DDP's; its buffer is reduced in place.

    Raises:
        TypeError: `state` is no AdasumState of this engine, or `bucket` no bucket of DDP's.
        ValueError: on every rank: a gradient that cannot be reduced, or that of a parameter which
            is marked with `mark_worker_local` or sharded (tensor parallelism).
        RuntimeError: a rank did not respond within the group's timeout.

    Warns, once, if backward has added to gradients that were reduced. It cannot notice this with
    `gradient_as_bucket_view`, or if something else has changed the gradients in between.

    Collective: DDP calls it in the same order on every rank; the last bucket's call blocks on a
    CPU.
    """
    if not isinstance(state, AdasumState):
        is_class = isinstance(state, type)
        got = f"the class {state.__name__}" if is_class else type(state).__name__
        raise TypeError(
            f"adasum_hook: expected an AdasumState of {__name__}, but got {got}; call "
            "register_comm_hook(AdasumState(process_group=...), adasum_hook)"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            "adasum_hook: expected a bucket of DistributedDataParallel, but got "
            f"{type(bucket).__name__}; FSDP's modules and DDP's Python reducer have none, see "
            "docs/parallel.md"
        )
    if bucket.index() == 0:
        state._finish()  # of an interrupted backward pass
        state.reduced.clear()
        state.rule.begin_pass()
    future = state._start(bucket.buffer(), bucket.index(), bucket.parameters())
    if bucket.is_last():
        state._finish()
        state.passes += 1
        state.rule.end_pass()
        state._last_pass.note(state.reduced)
        for call in state._on_round:
            call()
    return future
