"""Does the simulation of benchmarks/convergence.py compute what real processes compute?"""

from __future__ import annotations

import convergence
import numpy as np
import torch
from torch.nn import functional

import adasum_hvd.torch as hvd

STEPS, SEED, BATCH = 4, 3, 8
ADASUM = ("adasum-grad", "adasum-delta")


def _train_for_real(op: str, optimizer: str, rate: float) -> list[np.ndarray]:
    """Return the weights after STEPS steps of the job that this process is a rank of."""
    images, labels, _, _ = convergence.digits()
    torch.manual_seed(SEED)
    model = convergence.LeNet5()
    if optimizer == "adam":
        inner = torch.optim.Adam(model.parameters(), rate)
    else:
        inner = torch.optim.SGD(model.parameters(), rate, momentum=convergence.MOMENTUM)
    distributed = hvd.DistributedOptimizer(inner, model.named_parameters(), op=op)
    draws = convergence.batches(SEED, len(images), BATCH)
    steps = convergence.EPOCHS * len(images) // (BATCH * hvd.size())
    for step in range(STEPS):
        distributed.param_groups[0]["lr"] = convergence.schedule(step, steps, rate)
        chosen = [next(draws) for _ in range(hvd.size())][hvd.rank()]
        distributed.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        distributed.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def _simulated(op: str, rate: float, optimizer: str) -> list[np.ndarray]:
    """Return the simulation's weights, which have moved since its first step."""
    early, simulated = (
        convergence.train(op, hvd.size(), rate, SEED, "test", BATCH, limit, optimizer)
        for limit in (1, STEPS)
    )
    pairs = zip(simulated["weights"], early["weights"], strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) > rate / 300, f"{op} did not move"
    return simulated["weights"]


def case_simulation_is_the_job() -> None:
    for op in convergence.OPS:
        real = _train_for_real(op, "momentum", 0.3)
        simulated = _simulated(op, 0.3, "momentum")
        for mine, theirs in zip(real, simulated, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-6, err_msg=op)


def case_simulation_is_the_job_with_adam() -> None:
    """On the whole: where a gradient is next to nothing, Adam makes a step of its rounding."""
    for op in ADASUM:
        real, simulated = (
            np.concatenate([w.ravel() for w in weights])
            for weights in (
                _train_for_real(op, "adam", 0.01),
                _simulated(op, 0.01, "adam"),
            )
        )
        assert np.abs(real - simulated).mean() < 5e-6, op
