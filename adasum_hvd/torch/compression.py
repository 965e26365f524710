"""What gradients and changes of weights are cast to while they travel."""

from __future__ import annotations

import torch
from horovod.torch import compression

from adasum_hvd.common import ops
from adasum_hvd.torch import ops as torch_ops


class BF16Compressor(compression.Compressor):
    """Casts floating-point tensors to bfloat16, and back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor as bfloat16, and the dtype that it had."""
        short = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        return short, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: torch.dtype) -> torch.Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(context)


class Compression(compression.Compression):
    """Horovod's `none` and `fp16`, and `bf16` for AdaSum: float32's range in two bytes."""

    bf16 = BF16Compressor


def compressions(op: ops.ReduceOp) -> tuple[type[compression.Compressor], ...]:
    """Return those that a wrapper of this reduction can use."""
    if ops.is_adasum(op) and torch_ops.settings()["op"] == "on":
        return Compression.none, Compression.fp16, Compression.bf16
    return Compression.none, Compression.fp16
