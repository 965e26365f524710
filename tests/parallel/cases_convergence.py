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

STEPS, SEED, BATCH = 4, 3, 8
ADASUM = ("adasum-grad", "adasum-delta")
# With the tolerance of the weights: Adam divides by the size of its gradients.
SETTINGS = {"momentum": (0.3, 2e-6, convergence.OPS), "adam": (0.3, 1e-4, ADASUM)}


def start() -> None:
    hvd.init()
    torch.set_num_threads(1)


def align() -> None:
    hvd.barrier()


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


def case_simulation_is_the_job() -> None:
    for optimizer, (rate, atol, reductions) in SETTINGS.items():
        for op in reductions:
            early, simulated = (
                convergence.train(
                    op, hvd.size(), rate, SEED, "test", BATCH, limit, optimizer
                )
                for limit in (1, STEPS)
            )
            pairs = zip(simulated["weights"], early["weights"], strict=True)
            assert max(np.abs(a - b).max() for a, b in pairs) > 1e-3, f"{op} stood"
            real = _train_for_real(op, optimizer, rate)
            for mine, theirs in zip(real, simulated["weights"], strict=True):
                message = f"{op}, {optimizer}"
                np.testing.assert_allclose(mine, theirs, atol=atol, err_msg=message)
