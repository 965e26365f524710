"""AdaSum under torch's DistributedDataParallel: communication hooks.

The op reduces DDP's buckets in place, with separate coefficients for every parameter. The
gradients equal those of `DistributedOptimizer(op=AdasumGrad)` bit for bit. With a hook DDP does
not divide gradients by the number of ranks, and the program must not either.

No `from __future__ import annotations` here, because DDP checks the hooks' annotations.

References:
    arXiv 2006.02924, section 3; docs/where_to_use.md.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from horovod.torch import mpi_ops

from adasum_hvd.base import agreement, ops
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.base.rounds import Rounds
from adasum_hvd.distributed.reduced import LastPass
from adasum_hvd.distributed.sharded_types import shard_problem
from adasum_hvd.horovod import binding
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch import wire
from adasum_hvd.torch.compression import Compression, compressions
from adasum_hvd.torch.objects import allgather_object, ranks_of

__all__ = [
    "AdasumState",
    "adasum_hook",
    "keep_local_hook",
]

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
# By process set; its ranks create states in the same order, so the numbers agree.
_instances: dict[int, Iterator[int]] = {}


class _Started(NamedTuple):
    """A bucket whose reduction has started, and the future that DDP waits for."""

    future: torch.futures.Future[torch.Tensor]
    handle: int
    flat: torch.Tensor
    sent: torch.Tensor  # `flat`, or a copy in the wire dtype


class AdasumState(Rounds):
    """The state of :func:`adasum_hook` for one DDP model.

    Args:
        process_set: the ranks of DDP's process group; by default all ranks.
        compression: `Compression.fp16` or `Compression.bf16`: two bytes per element on the wire.
            By default gradients are sent in their own dtype.

    Raises:
        ValueError: Horovod is not initialized, or torch's process group has other ranks than
            Horovod, or they have other arguments; on every rank. Or this rank is not in
            `process_set`, or Horovod does not know it.
        NotImplementedError: no such compression; an elastic job.

    Collective: every rank of `process_set`; blocks.

    Example:
        >>> ddp = torch.nn.parallel.DistributedDataParallel(model)  # doctest: +SKIP
        >>> ddp.register_comm_hook(AdasumState(), adasum_hook)      # doctest: +SKIP
    """

    def __init__(
        self,
        process_set: ProcessSet | None = None,
        compression: Any = None,
    ):
        super().__init__()
        mpi_ops.size()  # raises if Horovod is not initialized
        agreement.refuse_elastic("AdasumState")
        self.process_set = process_set or mpi_ops.global_process_set
        agreement.require_registered(self.process_set)
        self.compression = compression or Compression.none
        _check(self)
        numbers = _instances.setdefault(
            self.process_set.process_set_id, itertools.count()
        )
        self._label = f"ddp.{next(numbers)}"
        self._names: dict[tuple[int, ...], str] = {}
        self._started: list[_Started] = []
        # The parameters of this backward pass's buckets, by the bucket's name in Horovod.
        self.reduced: dict[str, list[torch.Tensor]] = {}
        self.last_pass = LastPass()

    def _name(self, index: int, elements: tuple[int, ...]) -> str:
        """Return a bucket's name, which includes its sizes: DDP rebuilds buckets after a step."""
        key = index, *elements
        if key not in self._names:
            digest = hashlib.sha256(repr(elements).encode()).hexdigest()[:12]
            label = f"{self._label}.{index}/{digest}"
            self._names[key] = binding.segmented(label, elements)
        return self._names[key]

    def start(
        self, flat: torch.Tensor, index: int, parameters: list[torch.Tensor]
    ) -> torch.futures.Future[torch.Tensor]:
        """Start to reduce a bucket in place; return a future that :meth:`finish` completes.

        Args:
            flat: the bucket's gradients, concatenated.
            index: the bucket's number.
            parameters: the bucket's parameters, in the order of their gradients.

        Raises:
            ValueError: a parameter is sharded (tensor parallelism); on every rank.
        """
        elements = tuple(parameter.numel() for parameter in parameters)
        future = _future_on(flat)
        if self.process_set.size() == 1:
            future.set_result(flat)
            return future
        for problem in filter(None, map(shard_problem, parameters)):
            raise ValueError(f"adasum_hook: {problem}")
        self.last_pass.check(parameters)
        sent, _ = self.compression.compress(flat)
        name = self._name(index, elements)
        self.reduced[wire.entry(name, ops.AdasumGrad, sent.dtype)] = parameters
        handle = torch_ops.allreduce_async_(
            sent,
            name=name,
            op=ops.AdasumGrad,
            process_set=self.process_set,
        )
        self._started.append(_Started(future, handle, flat, sent))
        return future

    def finish(self) -> None:
        """Wait for all started buckets. Collective; blocks.

        Raises:
            ValueError: the op refused the tensors; on every rank.
            HorovodInternalError: a reduction failed.
        """
        started, self._started = self._started, []
        for future, handle, flat, sent in started:
            wire.synchronize(handle)
            if sent is not flat:
                flat.copy_(sent)
            future.set_result(flat)


def _check(state: AdasumState) -> None:
    """Compare the ranks' numbers in torch and in Horovod, and their arguments. Collective."""
    process_set = state.process_set
    if not process_set.included():
        raise ValueError(
            f"AdasumState: expected a process set that includes this rank, but got {process_set} "
            f"(rank {mpi_ops.rank()} of {mpi_ops.size()}); pass the ranks of DDP's process group"
        )
    if state.compression not in compressions(ops.AdasumGrad):
        raise NotImplementedError(
            "compression: expected Compression.none, Compression.fp16 or Compression.bf16, but "
            f"got {state.compression!r}"
        )
    arguments = {"compression": state.compression.__name__}
    ranks = ranks_of(process_set)
    in_torch = (
        (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    )
    by_rank = allgather_object((arguments, in_torch), "adasum.ddp", process_set)
    for rank, (_, numbers) in zip(ranks, by_rank, strict=True):
        if numbers is not None and numbers != (rank, mpi_ops.size()):
            raise ValueError(
                "AdasumState: expected the same ranks in torch.distributed and in Horovod, but got "
                f"rank {numbers[0]} of {numbers[1]} in torch.distributed and rank {rank} of "
                f"{mpi_ops.size()} in Horovod (seen by rank {mpi_ops.rank()}); start both from one "
                "launcher: call init_process_group() first, then hvd.init(), or pass "
                "rank=hvd.rank() and world_size=hvd.size() to init_process_group()"
            )
    agreement.compare_settings(
        [settings for settings, _ in by_rank],
        mpi_ops.rank(),
        "arguments of AdasumState",
        "pass the same arguments on every rank",
        ranks,
    )


def _future_on(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future for a tensor; on a device, `wait` synchronizes the streams."""
    return torch.futures.Future(devices=None if tensor.is_cpu else [tensor.device])


def adasum_hook(
    state: AdasumState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of gradients by AdaSum, for `DistributedDataParallel.register_comm_hook`.

    Buckets are reduced while backward runs. The last bucket's hook waits for all results, because
    a waiting thread would take CPU time from backward.

    Args:
        state: the model's.
        bucket: a bucket of DDP's; its buffer is reduced in place.

    Raises:
        TypeError: `bucket` is not a bucket of DDP's.
        SparseAdasumError: a gradient is sparse.
        ValueError, HorovodInternalError: as :meth:`AdasumState.finish`.

    Warns, once, if backward has added to gradients that were reduced. It cannot notice this with
    `gradient_as_bucket_view`, or if something else has changed the gradients in between.

    Collective: DDP calls it in the same order on every rank; the last bucket's call blocks.
    """
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            "adasum_hook: expected a bucket of DistributedDataParallel, but got "
            f"{type(bucket).__name__}; FSDP's modules and DDP's Python reducer have no buckets, "
            "see docs/parallel.md"
        )
    if bucket.index() == 0:
        state.finish()  # buckets of an interrupted backward pass
        state.reduced.clear()
    future = state.start(bucket.buffer(), bucket.index(), bucket.parameters())
    if bucket.is_last():
        state.finish()
        state.last_pass.note(state.reduced)
        state.end_round()
    return future


def keep_local_hook(
    state: None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Leave gradients as they are on each rank, for `DistributedOptimizer(op=AdasumDelta)`.

    Args:
        state: None.
        bucket: a bucket of DDP's.
    """
    future = _future_on(bucket.buffer())
    future.set_result(bucket.buffer())
    return future


keep_local_hook.keeps_local = True  # type: ignore[attr-defined]  # parallel/torch_modes.py
