"""AdaSum under torch's DistributedDataParallel: a communication hook without Horovod.

On a CPU a thread reduces buckets while backward runs, and the last bucket's hook waits for it. On
other devices reductions are queued on a stream, and nothing waits for a value.

No `from __future__ import annotations` here, because DDP checks the hooks' annotations.

References:
    arXiv 2006.02924, section 3; docs/distributed.md.
"""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd.base.marks import is_marked_local, times_marked
from adasum_hvd.distributed import native
from adasum_hvd.distributed.checks import Call, agree, call_of
from adasum_hvd.distributed.communicator import Communicator, check_groups
from adasum_hvd.distributed.lanes import Future, Lane, done, lane_on, wait_quietly
from adasum_hvd.distributed.reduced import LastPass
from adasum_hvd.distributed.reduction import reduce_buffer
from adasum_hvd.distributed.rules import Coefficients, Ruled, rule_of
from adasum_hvd.distributed.sharding import shard_problem
from adasum_hvd.monitor.statistics import TensorRecord

# Of hooks that reduce over the state's ranks alone: ours, and torch's wrappers of one.
_HOOKS = __name__, "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


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


class AdasumState(Ruled):
    """The state of :func:`adasum_hook` for one DDP model.

    Args:
        process_group: DDP's, or its mesh of one dimension; by default the default one. Another
            one than DDP's is an error of the first backward pass.
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
            settings = self.rule.described | {"compression": _name(compression)}
            call = call_of([], settings)
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
        self._shared = native.SharedBuckets(self.communicator, self.rule)
        self.passes = 0  # that were reduced
        self._on_round: list[Callable[[], None]] = []
        # For `monitor.monitor.Channel`, by the bucket's name.
        self.requested: set[str] = set()
        self.records: dict[str, TensorRecord] = {}
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
        """Start to reduce a bucket of gradients in place; return a future of it."""
        bucket = self._described(index, parameters)
        is_alone = self.communicator.size == 1 and flat.layout is torch.strided
        if is_alone and not bucket.problem:
            return done(flat)
        if self.rule.kind != "mean":
            self._last_pass.check(parameters)
        self.reduced[bucket.entry] = parameters
        if flat.device not in self._lanes:
            self._lanes[flat.device] = lane_on(flat.device, self.communicator)
        at = self._shared.address(flat) if self.compression is None else None
        task = partial(self._reduce, flat, bucket, at)
        future = self._lanes[flat.device].submit(task, [flat])
        if flat.is_cpu:
            self._started.append(future)
        return future

    def _described(self, index: int, parameters: list[torch.Tensor]) -> _Bucket:
        key = (index, times_marked(), *map(id, parameters))
        if key not in self._buckets:
            sizes = tuple(parameter.numel() for parameter in parameters)
            problem = next(filter(None, map(self._problem, parameters)), "")
            if not index:  # not for every bucket, because it searches all objects
                problem = problem or self._group_problem()
            entry = f"{index}/{hash(sizes)}"
            self._buckets[key] = _Bucket(parameters, entry, sizes, problem)
        return self._buckets[key]

    def _group_problem(self) -> str:
        """Return why this state is not for the ranks of its models, or ""."""
        mine = self.communicator.ranks
        for model in gc.get_objects():
            # Not `isinstance`, because proxies of other packages answer it.
            if not issubclass(type(model), DistributedDataParallel):
                continue
            hooks = getattr(model, "_comm_hooks", ())
            if any(
                s is self and getattr(h, "__module__", "") in _HOOKS for h, s in hooks
            ):
                ranks = dist.get_process_group_ranks(model.process_group)
                if {*ranks} != {*mine}:
                    return (
                        f"expected the ranks of DDP's process group, {ranks}, but got a state "
                        f"for {mine}; pass that group, AdasumState(process_group=...)"
                    )
        return ""

    def _problem(self, parameter: torch.Tensor) -> str:
        if self.communicator.size == 1:  # nothing is reduced
            return ""
        if is_marked_local(parameter):
            return (
                "expected parameters that all ranks share, but got one that is marked with "
                "mark_worker_local, and DDP hands over all gradients; keep it in a module outside "
                "DistributedDataParallel"
            )
        if parameter.is_complex():  # whose parts DDP puts into the bucket
            return "expected real parameters, but got a complex one"
        # A mean of parts is a part of the mean.
        return "" if self.rule.kind == "mean" else shard_problem(parameter)

    def _reduce(
        self,
        flat: torch.Tensor,
        bucket: _Bucket,
        at: int | None,
        communicator: Communicator,
    ) -> torch.Tensor:
        _, entry, sizes, _ = bucket
        self._agree(flat, bucket, communicator)
        sent = flat if self.compression is None else flat.to(self.compression)
        observe = entry in self.requested
        record = reduce_buffer(sent, sizes, communicator, self.rule, (), at, observe)
        if record is not None:
            before = self.records.get(entry, record)
            self.requested.discard(entry)
            self.records[entry] = record._replace(number=before.number + 1)
        if sent is not flat:
            flat.copy_(sent)
        return flat

    def _agree(
        self, flat: torch.Tensor, bucket: _Bucket, communicator: Communicator
    ) -> None:
        """Raise ValueError if a new bucket differs over the ranks, or cannot be reduced."""
        _, _, sizes, problem = bucket
        known = (flat.dtype, flat.layout, sizes, problem)
        if known not in self._known:
            if not problem and sum(sizes) != flat.numel():
                problem = (
                    f"expected the {flat.numel()} elements of DDP's bucket, but got parameters of "
                    f"{sum(sizes)}; a parameter has other data than at the start, as if it were "
                    "offloaded: give it back before backward ends"
                )
            call = Call(problem=ValueError(problem))
            if not problem:
                call = call_of([flat], self.rule.described | {"parameters": sizes})
            agree("adasum_hook", call, communicator)
            self._known.add(known)

    def _finish(self) -> None:
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


@torch._disable_dynamo  # of a compiled step, which would trace this
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

    Warns, once, if backward has added to gradients that were reduced: docs/distributed.md,
    "Functions".

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


_registered: weakref.WeakKeyDictionary[Any, tuple[AdasumState, dict[str, Any]]]
_registered = weakref.WeakKeyDictionary()  # by DDP model


def register_adasum_hook(
    model: torch.nn.Module, **arguments: Any
) -> AdasumState | None:
    """Register :func:`adasum_hook` on a model that a trainer has wrapped, once.

    Unlike `register_comm_hook` it may be called again, and in a job of one process.

    Args:
        model: the trainer's, of `DistributedDataParallel`; also compiled.
        arguments: of :class:`AdasumState`; `process_group` is the model's by default.

    Returns:
        The model's state, the same for later calls. None in a job of one process whose model is
        not wrapped.

    Raises:
        TypeError: the model is not wrapped, in a job of several processes.
        ValueError: the model has the hook with other arguments; or as :class:`AdasumState`.

    Collective: every rank of the model's process group; blocks on the first call.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, DistributedDataParallel):
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise TypeError(
                "register_adasum_hook: expected a model of DistributedDataParallel, but got "
                f"{type(model).__name__} (rank {dist.get_rank()} of {dist.get_world_size()}); "
                "call it after the trainer has wrapped the model, and use adasum_replicate for "
                "a sharded one"
            )
        return None
    if model not in _registered:
        group = arguments.get("process_group") or model.process_group
        state = AdasumState(**arguments | {"process_group": group})
        model.register_comm_hook(state, adasum_hook)
        _registered[model] = state, arguments
    state, known = _registered[model]
    if known != arguments:
        raise ValueError(
            f"register_adasum_hook: expected the arguments of the first call, {known}, but got "
            f"{arguments} (rank {dist.get_rank()} of {dist.get_world_size()}); a DDP model keeps "
            "its hook"
        )
    return state
