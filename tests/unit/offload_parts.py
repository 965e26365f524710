"""Parameters, gradients and the reference for the tests of torch's `AdamOffload`."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from adasum_hvd.adam_offload import AdamOffload
from adasum_hvd.offload import adam, host

TOLERANCE = 1e-6  # relative to the largest weight, after 100 steps in float32
# 0-d, empty, odd, and longer than one thread's part of the scratch buffer.
SHAPES = [(), (0,), (7,), (33, 5), (1003,)]
host.PIECE_ELEMENTS = 1000  # in all tests of AdamOffload


def offload(params, *args, **kwargs) -> AdamOffload:
    return AdamOffload(params, *args, **{"num_threads": 1, "verbose": False, **kwargs})


def parameters(seed: int = 0, dtype=torch.float32, shapes=SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in shapes
    ]


def set_gradients(params, step: int, scale: float = 1.0) -> None:
    """Set gradients of many magnitudes; the small ones are sensitive to eps."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        if not p.requires_grad:
            continue
        magnitude = 10.0 ** torch.randint(-8, 1, p.shape, generator=generator)
        gradient = torch.randn(p.shape, generator=generator) * magnitude * scale
        p.grad = gradient.to(p.dtype)


class Reference:
    """The float64 definition on copies of the parameters."""

    def __init__(self, params, **settings):
        self.params, self.settings = params, {"lr": 0.01, **settings}
        self.weights = [p.detach().double().cpu().numpy().copy() for p in params]
        self.m = [np.zeros(w.shape) for w in self.weights]
        self.v = [np.zeros(w.shape) for w in self.weights]
        self.t = 0

    def step(self, **settings):
        self.t += 1
        for p, w, m, v in zip(self.params, self.weights, self.m, self.v, strict=True):
            g = p.grad.detach().double().cpu().numpy()
            adam.reference_step(w, g, m, v, self.t, **{**self.settings, **settings})

    def check(self, tensors, tolerance=TOLERANCE):
        for tensor, expected in zip(tensors, self.weights, strict=True):
            if expected.size:
                error = np.abs(tensor.detach().double().numpy() - expected).max()
                assert error <= tolerance * np.abs(expected).max(), tuple(tensor.shape)


def equal(these, those) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def train(optimizer, params, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(params, step)
        optimizer.step()
