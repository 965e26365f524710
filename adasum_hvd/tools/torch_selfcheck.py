"""`adasum_hvd.tools.selfcheck` with PyTorch's tensors."""

from __future__ import annotations

import torch

import adasum_hvd.torch as hvd
from adasum_hvd.tools.selfcheck import Array
from adasum_hvd.torch.wire import LIBRARY

__all__ = ["LIBRARY", "hvd", "reduce"]


def reduce(name: str, array: Array) -> Array:
    """Return the AdaSum of every rank's array. Collective; blocks."""
    return hvd.allreduce(torch.from_numpy(array), op=hvd.Adasum, name=name).numpy()
