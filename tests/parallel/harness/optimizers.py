"""Optimizers that keep weights in their state: copies of the present ones, or records."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing


class Keeps(torch.optim.Optimizer):
    """An optimizer with weights in its state; subclasses say which.

    Args:
        first_rate: of the first step.
    """

    def __init__(self, parameters, first_rate: float = 0.1):
        super().__init__(parameters, {"lr": first_rate})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"], self.state[p])
            group["lr"] = 0.1
        self.steps += 1

    def update(self, p, rate, state):
        raise NotImplementedError


class Master(Keeps):
    def update(self, p, rate, state):
        p.copy_(state.setdefault("master", p.clone().float()).sub_(p.grad, alpha=rate))


class DroppingMaster(Master):
    def update(self, p, rate, state):
        super().update(p, rate, state)
        p.grad = None


class OneMaster(Master):
    """Of matrices only; flat, as optimizers that merge dimensions."""

    def update(self, p, rate, state):
        if p.ndim == 1:
            p.sub_(p.grad, alpha=rate)
            return
        master = state.setdefault("master", p.clone().flatten())
        p.copy_(master.sub_(p.grad.flatten(), alpha=rate).view_as(p))


class RandomlyRounded(Master):
    def update(self, p, rate, state):
        super().update(p, rate, state)
        up = torch.nextafter(p, torch.full_like(p, torch.inf))
        p.copy_(torch.where(torch.rand(p.shape) < 0.5, p, up))


class ScheduleFree(Keeps):
    """`p` is between the average and `z`; equal to `z` after the first step only."""

    def update(self, p, rate, state):
        z = state.setdefault("z", p.clone())
        x = state.setdefault("x", p.clone())
        z.sub_(p.grad, alpha=rate)
        x.lerp_(z, 1 / (self.steps + 1))
        p.copy_(x.lerp(z, 0.1))


class Averaging(Keeps):
    """As SPlus: an average from zero, which `eval` puts into the parameters."""

    def update(self, p, rate, state):
        p.sub_(p.grad, alpha=rate)
        state.setdefault("mean", torch.zeros_like(p)).lerp_(p, 0.1)

    def eval(self):
        pass

    train = eval


class FTRL(Keeps):
    """Computes the weights from the sum of all gradients."""

    def update(self, p, rate, state):
        start = state.setdefault("start", p.clone())
        total = state.setdefault("total", torch.zeros_like(p)).add_(p.grad)
        p.copy_(start - rate * total)


class Record(Keeps):
    """The first weights, as Prodigy and MADGRAD."""

    def update(self, p, rate, state):
        state.setdefault("x0", p.clone())
        p.sub_(p.grad, alpha=rate)


class Slow(Keeps):
    """Lookahead's slow weights."""

    def update(self, p, rate, state):
        slow = state.setdefault("slow", p.clone())
        p.sub_(p.grad, alpha=rate)
        if self.steps % 3 == 2:
            p.copy_(slow.lerp_(p, 0.5))


class Velocity(Keeps):
    """The last change, which equals a parameter that began at zero."""

    def update(self, p, rate, state):
        p.add_(state.setdefault("velocity", torch.zeros_like(p)).copy_(-rate * p.grad))


class Quantized(torch.Tensor):
    """A wrapper subclass with two operators, as torchao's states."""

    def __new__(cls, scaled):
        return torch.Tensor._make_wrapper_subclass(cls, scaled.shape)

    def __init__(self, scaled):
        self.scaled = scaled

    def __tensor_flatten__(self):
        return ["scaled"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        if function is not torch.ops.aten.detach.default:
            raise NotImplementedError(function)
        made = cls(arguments[0].scaled)
        return return_and_correct_aliasing(function, arguments, named or {}, made)


class QuantizedState(Keeps):
    def update(self, p, rate, state):
        state["mean"] = Quantized((p.grad * 16).round().to(torch.int8))
        p.sub_(p.grad, alpha=rate)
