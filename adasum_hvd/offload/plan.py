"""The bytes of `AdamOffload` on one rank, and the dtype of each master."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch

from adasum_hvd.offload.cores import launched, thread_budget
from adasum_hvd.offload.host import PIECE_ELEMENTS


def master_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's moments and master: float32, or its own float64."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def is_own_master(param: torch.Tensor) -> bool:
    """Return whether the host can update the parameter itself."""
    same = param.dtype == master_dtype(param)
    return bool(param.is_cpu and same and param.is_contiguous())


@dataclass(frozen=True)
class Plan:
    """Bytes of an `AdamOffload` on one rank: host memory, except `model` and `kept_on_device`."""

    params: int  # number of elements of all parameters
    moments: int  # both of them
    masters: int  # of parameters that need one
    pinned: int  # page-locked buffers for parameters on CUDA
    scratch: int
    model: int  # parameters on CUDA and as many gradients
    available: int  # free host memory, which all ranks of the host share
    kept_on_device: int = 0  # by the optimizer, between steps

    @classmethod
    def of(cls, params: Iterable[torch.Tensor]) -> Plan:
        """Return the bytes that these parameters will need; allocate nothing."""
        trained = [param for param in params if param.requires_grad]
        sizes = [param.numel() * master_dtype(param).itemsize for param in trained]
        pinned = sum(param.nbytes for param in trained if param.is_cuda)
        sized = zip(trained, sizes, strict=True)
        return cls(
            params=sum(param.numel() for param in trained),
            moments=2 * sum(sizes),
            masters=sum(size for param, size in sized if not is_own_master(param)),
            pinned=pinned,
            # Two float32 tensors, if a step needs scratch at all.
            scratch=2 * 4 * PIECE_ELEMENTS * thread_budget(),
            model=2 * pinned,
            available=psutil.virtual_memory().available,
        )

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
            f"{mib(self.model)})"
        )
        _, ranks = launched()
        if self.host * ranks > self.available:
            line += (
                f"; WARNING: {ranks} ranks on this host need {mib(self.host * ranks)}, which is "
                "more than is available"
            )
        return line
