"""Wire dtypes of gradients and weight changes."""

from __future__ import annotations

import torch
from horovod.torch import compression

from adasum_hvd.base import ops
from adasum_hvd.torch import wire


class BF16Compressor(compression.Compressor):
    """Casts floating-point tensors to bfloat16, and back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor as bfloat16, and its original dtype."""
        short = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        return short, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: torch.dtype) -> torch.Tensor:
        """Return the tensor in its original dtype."""
        return tensor.to(context)


class Compression(compression.Compression):
    """Horovod's `none` and `fp16`, and `bf16` for AdaSum: float32's range in two bytes."""

    bf16 = BF16Compressor


def compressions(op: ops.ReduceOp) -> tuple[type[compression.Compressor], ...]:
    """Return the compressions that an optimizer with this reduction supports."""
    if ops.is_adasum(op) and wire.op_is_on():
        return Compression.none, Compression.fp16, Compression.bf16
    return Compression.none, Compression.fp16
