"""Reduced gradients of a `backward(create_graph=True)`: values without a graph.

The graph of a reduced gradient would reach through every rank's loss. A rank that differentiates
its own part instead, as AdaHessian does, takes another step than the others.
"""

from __future__ import annotations

from typing import Any

import torch


class _WithoutGraph(torch.autograd.Function):
    """A tensor that requires a gradient, and refuses to be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, reduced: torch.Tensor, name: str
    ) -> torch.Tensor:
        ctx.name = name
        return reduced.data

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"gradient of {ctx.name}: expected an optimizer that does not differentiate the "
            "reduced gradient, which has no graph, but got one that does, such as AdaHessian; "
            "pass op=AdasumDelta, whose local steps have this rank's own gradients"
        )


def without_graph(
    parameter: torch.Tensor, reduced: torch.Tensor, name: str
) -> torch.Tensor:
    """Return `reduced` as a gradient of the parameter that cannot be differentiated.

    It requires a gradient, as the local one did, because some optimizers skip other gradients.
    """
    with torch.enable_grad():
        without: torch.Tensor = _WithoutGraph.apply(parameter, reduced, name)
        return without
