"""AdaSum under torch's DistributedDataParallel: communication hooks.

DDP's buckets are reduced by the op, in place, and every parameter keeps coefficients of its own:
the gradients become those of `DistributedOptimizer(op=AdasumGrad)`, bit for bit. Where a hook is
registered DDP divides by nothing, and neither must the program.

DDP looks at the hooks' annotations, which are therefore no strings here.

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

from adasum_hvd.common import agreement, binding, ops
from adasum_hvd.common.options import ProcessSet
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
_instances: dict[int, Iterator[int]] = {}  # by process set, whose ranks count alike


class _Started(NamedTuple):
    """A bucket that travels, and what DDP waits for."""

    future: torch.futures.Future[torch.Tensor]
    handle: int
    flat: torch.Tensor
    sent: torch.Tensor  # `flat`, or a copy in the wire dtype


class AdasumState:
    """What :func:`adasum_hook` keeps for one DDP model.

    Args:
        process_set: the ranks of DDP's process group; all of them by default.
        compression: `Compression.fp16` or `Compression.bf16`: two bytes on the wire. By default
            gradients travel in their own dtype.

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
        mpi_ops.size()  # raises where Horovod has not been initialized
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
        # The parameters of the buckets of this backward pass, by the name Horovod has for it.
        self.reduced: dict[str, list[torch.Tensor]] = {}
        self._on_round: list[Callable[[], None]] = []

    def _name(self, index: int, elements: tuple[int, ...]) -> str:
        """Return a bucket's name: DDP builds others of the same index and size after a step."""
        key = index, *elements
        if key not in self._names:
            digest = hashlib.sha256(repr(elements).encode()).hexdigest()[:12]
            label = f"{self._label}.{index}/{digest}"
            self._names[key] = binding.segmented(label, elements)
        return self._names[key]

    def start(
        self, flat: torch.Tensor, index: int, parameters: list[torch.Tensor]
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to reduce a bucket in place, and return what :meth:`finish` completes.

        Args:
            flat: the bucket's gradients, laid end to end.
            index: the bucket's number.
            parameters: those whose gradients they are, in order.
        """
        elements = tuple(parameter.numel() for parameter in parameters)
        future = _future_on(flat)
        if self.process_set.size() == 1:
            future.set_result(flat)
            return future
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
        """Wait for all buckets that have been started. Collective; blocks.

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

    def on_round(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call a function whenever all gradients of a pass are reduced; return what ends that."""
        self._on_round.append(call)
        return lambda: self._on_round.remove(call)

    def end_round(self) -> None:
        """Note that all gradients of a backward pass are reduced."""
        for call in self._on_round:
            call()


def _check(state: AdasumState) -> None:
    """Compare what the ranks are in torch and in Horovod, and their arguments. Collective."""
    process_set = state.process_set
    if not process_set.included():
        raise ValueError(
            f"AdasumState: required a process set that this rank is in, got {process_set} on "
            f"rank {mpi_ops.rank()} of {mpi_ops.size()}; make one of DDP's process group"
        )
    if state.compression not in compressions(ops.AdasumGrad):
        raise NotImplementedError(
            "compression: required Compression.none, Compression.fp16 or Compression.bf16, got "
            f"{state.compression!r}"
        )
    mine = {"compression": state.compression.__name__}
    ranks = ranks_of(process_set)
    here = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    said = allgather_object((mine, here), "adasum.ddp", process_set)
    for rank, (_, there) in zip(ranks, said, strict=True):
        if there is not None and there != (rank, mpi_ops.size()):
            raise ValueError(
                f"AdasumState: required the ranks of torch.distributed and of Horovod to be the "
                f"same, got rank {there[0]} of {there[1]} there and rank {rank} of "
                f"{mpi_ops.size()} here (this is rank {mpi_ops.rank()}); start both from one "
                "launcher: call init_process_group() first, then hvd.init()"
            )
    agreement.compare_settings(
        [settings for settings, _ in said],
        mpi_ops.rank(),
        "arguments of AdasumState",
        "pass the same ones on every rank",
        ranks,
    )


def _future_on(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future for a tensor, whose result waits for the stream that it was set on."""
    return torch.futures.Future(devices=None if tensor.is_cpu else [tensor.device])


def adasum_hook(
    state: AdasumState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of gradients by AdaSum, for `DistributedDataParallel.register_comm_hook`.

    Buckets travel while backward runs. Their results are waited for in the last one's hook, when
    all gradients are there: a thread that waits would take the processor from backward.

    Args:
        state: the model's.
        bucket: of DDP's; its buffer is reduced in place.

    Raises:
        TypeError: `bucket` is none of DDP's.
        SparseAdasumError: a sparse gradient.
        ValueError, HorovodInternalError: as :meth:`AdasumState.finish`.

    Collective: DDP calls it in the same order on every rank; the last bucket's call blocks.
    """
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            "adasum_hook: required a bucket of DistributedDataParallel, got "
            f"{type(bucket).__name__}; FSDP's modules and DDP's Python reducer have none, see "
            "docs/parallel.md"
        )
    if bucket.index() == 0:
        state.finish()  # of a backward pass that broke off
        state.reduced.clear()
    future = state.start(bucket.buffer(), bucket.index(), bucket.parameters())
    if bucket.is_last():
        state.finish()
        state.end_round()
    return future


def keep_local_hook(
    state: None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Leave gradients as they are on each rank, for `DistributedOptimizer(op=AdasumDelta)`.

    Args:
        state: None.
        bucket: of DDP's.
    """
    future = _future_on(bucket.buffer())
    future.set_result(bucket.buffer())
    return future


keep_local_hook.keeps_local = True  # type: ignore[attr-defined]  # parallel/torch_modes.py
