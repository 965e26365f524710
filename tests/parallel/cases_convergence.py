"""Does the simulation of benchmarks/convergence.py compute what real processes compute?"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

import adasum_hvd.torch as hvd

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import convergence

STEPS, SEED, BATCH, RATE = 4, 3, 8, 0.3


def start() -> None:
    hvd.init()
    torch.set_num_threads(1)


def align() -> None:
    hvd.barrier()


def _train_for_real(op: str) -> list[np.ndarray]:
    """Return the weights after STEPS steps of the job that this process is a rank of."""
    images, labels, _, _ = convergence.digits()
    torch.manual_seed(SEED)
    model = convergence.LeNet5()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE, momentum=convergence.MOMENTUM),
        model.named_parameters(),
        op=op,
    )
    draws = convergence.batches(SEED, len(images), BATCH)
    steps = convergence.EPOCHS * len(images) // (BATCH * hvd.size())
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = convergence.schedule(step, steps, RATE)
        chosen = [next(draws) for _ in range(hvd.size())][hvd.rank()]
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def case_simulation_is_the_job() -> None:
    for op in convergence.OPS:
        early, simulated = (
            convergence.train(op, hvd.size(), RATE, SEED, "test", BATCH, limit)
            for limit in (1, STEPS)
        )
        pairs = zip(simulated["weights"], early["weights"], strict=True)
        assert max(np.abs(a - b).max() for a, b in pairs) > 1e-3, f"{op} did not move"
        for mine, theirs in zip(_train_for_real(op), simulated["weights"], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-6, err_msg=op)
