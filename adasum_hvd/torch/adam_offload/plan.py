"""What `AdamOffload` will hold where, and how many threads a rank may use for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
from horovod.torch import mpi_ops

from adasum_hvd.torch.adam_offload.host import PIECE_ELEMENTS


def master_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's moments and master: float32, or its own float64."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def is_own_master(param: torch.Tensor) -> bool:
    """Return whether the host can update the parameter itself."""
    return (
        param.is_cpu
        and param.dtype in (torch.float32, torch.float64)
        and param.is_contiguous()
    )


@dataclass(frozen=True)
class Plan:
    """Bytes of an `AdamOffload` on one rank.

    Attributes:
        params: number of parameters' elements.
        moments: both moments, on the host.
        masters: float32 masters of parameters that are not their own, on the host.
        pinned: page-locked buffers for parameters on CUDA, on the host.
        scratch: on the host.
        theirs: the device bytes of the parameters on CUDA and of as many gradients, which are
            the model's.
        kept_on_device: what the optimizer keeps on devices between steps: always 0.
        available: host memory that is free now, shared by all ranks of the host.
    """

    params: int
    moments: int
    masters: int
    pinned: int
    scratch: int
    theirs: int
    available: int
    kept_on_device: int = 0

    @property
    def host(self) -> int:
        """All host bytes."""
        return self.moments + self.masters + self.pinned + self.scratch

    def __str__(self) -> str:
        def mib(nbytes: int) -> str:
            return f"{nbytes / 2**20:.1f} MiB"

        line = (
            f"AdamOffload: {self.params} elements; host {mib(self.host)} (moments "
            f"{mib(self.moments)}, masters {mib(self.masters)}, pinned {mib(self.pinned)}, "
            f"scratch {mib(self.scratch)}) of {mib(self.available)} available; device "
            f"{mib(self.kept_on_device)} kept between steps (parameters and gradients on CUDA: "
            f"{mib(self.theirs)})"
        )
        if self.host * ranks_here() > self.available:
            line += (
                f"; WARNING: {ranks_here()} ranks on this host need "
                f"{mib(self.host * ranks_here())}, which is more than there is"
            )
        return line


def plan(params: Iterable[torch.Tensor]) -> Plan:
    """Return what these parameters will need; allocates nothing."""
    listed = [param for param in params if param.requires_grad]

    def total(bytes_each, chosen) -> int:
        return sum(param.numel() * bytes_each(param) for param in chosen)

    on_cuda = [param for param in listed if param.is_cuda]
    masters = [param for param in listed if not is_own_master(param)]
    itemsize = torch.Tensor.element_size
    # Scratch is two pieces of float32, where it is needed at all.
    return Plan(
        params=sum(param.numel() for param in listed),
        moments=total(lambda param: 2 * master_dtype(param).itemsize, listed),
        masters=total(lambda param: master_dtype(param).itemsize, masters),
        pinned=total(itemsize, on_cuda),
        scratch=2 * 4 * PIECE_ELEMENTS * thread_budget(),
        theirs=2 * total(itemsize, on_cuda),
        available=psutil.virtual_memory().available,
    )


def ranks_here() -> int:
    """Return the ranks on this host; 1 before `hvd.init()`."""
    return mpi_ops.local_size() if mpi_ops.is_initialized() else 1


def thread_budget() -> int:
    """Return this rank's share of the cores it may run on, at most what torch uses now."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(torch.get_num_threads(), cores // ranks_here()))


def prints_plan() -> bool:
    """Return whether this process speaks for the job: rank 0, or a process without Horovod."""
    return not mpi_ops.is_initialized() or mpi_ops.rank() == 0
