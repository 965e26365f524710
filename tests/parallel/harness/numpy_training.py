"""A two-layer network, its gradients and its optimizers in NumPy float64, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from adasum_hvd import reference

INPUTS, HIDDEN, OUTPUTS, BATCH = 6, 9, 3, 8
Weights = list[np.ndarray]


def initial_weights(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, OUTPUTS), (OUTPUTS,)]
    return [rng.standard_normal(shape).astype(np.float32) * 0.5 for shape in shapes]


def data_of(rank: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([7, rank])
    size = steps * BATCH
    images = rng.standard_normal((size, INPUTS)).astype(np.float32)
    return images, rng.standard_normal((size, OUTPUTS)).astype(np.float32)


def batch_of(rank: int, step: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    images, targets = data_of(rank, steps)
    part = slice(step * BATCH, (step + 1) * BATCH)
    return images[part], targets[part]


def gradients(weights: Weights, images: np.ndarray, targets: np.ndarray) -> Weights:
    """Return the gradients of the mean squared error of `tanh(x W1 + b1) W2 + b2`."""
    w1, b1, w2, b2 = (np.asarray(w, np.float64) for w in weights)
    hidden = np.tanh(images @ w1 + b1)
    error = 2 * (hidden @ w2 + b2 - targets) / targets.size
    back = (error @ w2.T) * (1 - hidden**2)
    return [images.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


class Sgd:
    def __init__(self, lr: float, momentum: float = 0.0):
        self.lr, self.momentum = lr, momentum
        self.velocity: Weights | None = None

    def __call__(self, weights: Weights, grads: Weights) -> Weights:
        old = self.velocity or [0.0 * g for g in grads]
        pairs = zip(old, grads, strict=True)
        self.velocity = [self.momentum * v - self.lr * g for v, g in pairs]
        return [w + v for w, v in zip(weights, self.velocity, strict=True)]


class Adam:
    """Adam, or AdamW with a `decay`."""

    def __init__(self, lr: float, beta1=0.9, beta2=0.999, epsilon=1e-7, decay=0.0):
        self.lr, self.betas, self.epsilon = lr, (beta1, beta2), epsilon
        self.decay = decay
        self.step = 0
        self.m: Weights | None = None
        self.v: Weights | None = None

    def __call__(self, weights: Weights, grads: Weights) -> Weights:
        self.step += 1
        b1, b2 = self.betas
        m, v = self.m or [0.0 * g for g in grads], self.v or [0.0 * g for g in grads]
        self.m = [b1 * a + (1 - b1) * g for a, g in zip(m, grads, strict=True)]
        self.v = [b2 * a + (1 - b2) * g * g for a, g in zip(v, grads, strict=True)]
        rate = self.lr * np.sqrt(1 - b2**self.step) / (1 - b1**self.step)
        return [
            (1 - self.lr * self.decay) * w - rate * a / (np.sqrt(b) + self.epsilon)
            for w, a, b in zip(weights, self.m, self.v, strict=True)
        ]


def reduce(tensors: Sequence[np.ndarray], op: str) -> np.ndarray:
    if op == "average":
        return np.mean(tensors, axis=0)
    if op == "sum":
        return np.sum(tensors, axis=0)
    return reference.adasum([np.asarray(t, np.float64) for t in tensors])


def train(
    make_optimizer: Callable,
    op: str,
    size: int,
    steps: int,
    passes: int = 1,
    local_steps: int = 1,
    clip: Callable[[Weights], Weights] = lambda grads: grads,
    first: int = 0,
) -> Weights:
    """Return the weights after `steps` batches on `size` ranks from rank `first` on."""
    delta = op in ("adasum", "adasum-delta")
    start = [np.asarray(w, np.float64) for w in initial_weights()]
    replicas = [start] * size
    optimizers = [make_optimizer() for _ in range(size)]
    sums: list[Weights] = [[0.0 * w for w in start] for _ in range(size)]
    taken = 0
    for step in range(steps):
        for rank, weights in enumerate(replicas):
            new = gradients(weights, *batch_of(first + rank, step, steps))
            sums[rank] = [a + b for a, b in zip(sums[rank], new, strict=True)]
        if (step + 1) % passes:
            continue
        grads, sums = sums, [[0.0 * w for w in start] for _ in range(size)]
        if not delta:
            reduced = [reduce(g, op) for g in zip(*grads, strict=True)]
            grads = [reduced] * size
        replicas = [
            optimizer(weights, clip(g))
            for optimizer, weights, g in zip(optimizers, replicas, grads, strict=True)
        ]
        taken += 1
        if delta and taken % local_steps == 0:
            changes = [
                [w - s for w, s in zip(weights, start, strict=True)]
                for weights in replicas
            ]
            start = [
                s + reduce(c, op)
                for s, c in zip(start, zip(*changes, strict=True), strict=True)
            ]
            replicas = [start] * size
    return replicas[0]


def clip_global_norm(limit: float) -> Callable[[Weights], Weights]:
    def clip(grads: Weights) -> Weights:
        norm = np.sqrt(sum(float(np.sum(g * g)) for g in grads))
        return [g * min(1.0, limit / norm) for g in grads]

    return clip


def clip_value(limit: float) -> Callable[[Weights], Weights]:
    return lambda grads: [np.clip(g, -limit, limit) for g in grads]


def clip_norm(limit: float) -> Callable[[Weights], Weights]:
    return lambda grads: [g * min(1.0, limit / np.linalg.norm(g)) for g in grads]
