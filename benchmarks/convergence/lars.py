"""LARS (You et al., arXiv 1708.03888): momentum SGD at each tensor's own rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from convergence.lamb import is_matrix, norms, trust


class LARS(torch.optim.Optimizer):
    """LARS for tensors whose first axis is workers: each has its own norms.

    `v = momentum v + lr |w| / (|g| + weight_decay |w|) (g + weight_decay w)`, then `w -= v`; the
    ratio is 1 if a norm is 0. The paper's trust coefficient is part of `lr`. Biases and the
    weights of norms take `v = momentum v + lr g`, as in `lamb.is_matrix`.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        self._momentum, self._weight_decay = momentum, weight_decay
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step with every parameter's gradient."""
        for group in self.param_groups:
            for weights in group["params"]:
                update, ratio = weights.grad, 1.0
                if is_matrix(weights):
                    length = norms(update) + self._weight_decay * norms(weights)
                    ratio = trust(weights, length)
                    update = update + self._weight_decay * weights
                state = self.state[weights]
                if not state:
                    state["velocity"] = torch.zeros_like(weights)
                velocity = state["velocity"].mul_(self._momentum)
                weights.sub_(velocity.add_(group["lr"] * ratio * update))
