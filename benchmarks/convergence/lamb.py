"""LAMB (You et al., arXiv 1904.00962): Adam's direction, at each tensor's own length."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class LAMB(torch.optim.Optimizer):
    """LAMB for tensors whose first axis is workers: each has its own norms.

    `w -= lr |w| / |u| u` with `u = m / (sqrt(v) + eps) + weight_decay w`; the ratio is 1 if a
    norm is 0. m and v are bias-corrected. Without `adapts_all`, biases and the weights of norms
    have no decay and the ratio 1, as in the authors' code: see `is_matrix`.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapts_all: bool = True,
    ) -> None:
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._adapts_all = adapts_all
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step with every parameter's gradient."""
        for group in self.param_groups:
            for weights in group["params"]:
                update, ratio = self._direction(weights), 1.0
                if self._adapts_all or is_matrix(weights):
                    update = update + self._weight_decay * weights
                    ratio = trust(weights, norms(update))
                weights.sub_(group["lr"] * ratio * update)

    def _direction(self, weights: torch.Tensor) -> torch.Tensor:
        state, gradient = self.state[weights], weights.grad
        if not state:
            state.update(step=0, m=torch.zeros_like(weights))
            state["v"] = torch.zeros_like(weights)
        state["step"] += 1
        one, two = self._betas
        state["m"].lerp_(gradient, 1 - one)
        state["v"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        mean = state["m"] / (1 - one ** state["step"])
        root = (state["v"] / (1 - two ** state["step"])).sqrt_()
        return mean.div_(root.add_(self._eps))


def is_matrix(weights: torch.Tensor) -> bool:
    """Return whether each worker's tensor has two axes or more: it is no bias, no norm's weight.

    The authors' code of LAMB, and MLPerf's of LARS, leave the others out of decay and of the
    adaptation, because their norms say little about a good length of a step.
    """
    return weights.dim() > 2


def trust(weights: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Return `|w|` over a length for each worker; 1 if one is 0 or not finite."""
    ratio = norms(weights) / length
    return torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0)


def norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm over all axes but the first, (workers, 1, ...)."""
    flat = torch.linalg.vector_norm(tensor.flatten(1), dim=1)
    return flat.view(-1, *[1] * (tensor.dim() - 1))
