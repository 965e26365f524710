"""The rules and optimizers that compete in study 7, each against its formula."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from convergence.lars import LARS
from convergence.reductions import RULES as FUNCTIONS
from convergence.reductions import gram, reduce_workers
from convergence.training import Job, Setting, train

from adasum_hvd import reference
from adasum_hvd.distributed.coefficients import lengths

RULES = [*FUNCTIONS, "adascale"]
SGD = Setting("digits", "momentum", "average", 4, 0.05, 1, target=0.9)


def vectors(workers: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(workers)
    common = torch.randn(shape, generator=generator)
    return common + torch.randn(workers, *shape, generator=generator)


def reduced(op: str, stacked: torch.Tensor) -> torch.Tensor:
    (tensor,) = reduce_workers([stacked], op).tensors
    return tensor


@pytest.mark.parametrize("op", RULES)
def test_one_workers_gradient_is_every_rules(op):
    stacked = vectors(1, 6)
    assert torch.equal(reduced(op, stacked), stacked[0])


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("op", RULES)
def test_equal_gradients_are_every_rules_result(op, workers):
    stacked = vectors(1, 6).expand(workers, 6)
    torch.testing.assert_close(reduced(op, stacked), stacked[0])


@pytest.mark.parametrize("op", RULES)
def test_zero_gradients_stay_zero(op):
    assert torch.equal(reduced(op, torch.zeros(4, 3)), torch.zeros(3))


def test_orthogonal_gradients_have_each_rules_length():
    """Sum, mean of norms, and mean; the ablation has the sum's length, which is AdaSum's."""
    stacked = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    total, norm = stacked.sum(0), stacked.sum(0).norm()
    torch.testing.assert_close(reduced("adasum", stacked), total)
    torch.testing.assert_close(reduced("mean-direction", stacked), total)
    torch.testing.assert_close(reduced("average", stacked), total / 4)
    torch.testing.assert_close(reduced("grafted", stacked), total / 4)
    # Unit vectors weigh the same, whatever the norms are.
    torch.testing.assert_close(reduced("rda", stacked), torch.full((4,), 2.5 / 2))
    assert norm == pytest.approx(30**0.5)


def test_rules_are_their_formulas():
    stacked = vectors(5, 9)
    rows = stacked.double().numpy()
    norms = np.linalg.norm(rows, axis=1)
    unit = (rows / norms[:, None]).mean(0)
    mean, adasum = rows.mean(0), np.asarray(reference.adasum(list(rows)))
    expected = {
        "average": mean,
        "adasum": adasum,
        "rda": norms.mean() * unit / np.linalg.norm(unit),
        "mean-direction": mean * np.linalg.norm(adasum) / np.linalg.norm(mean),
        "grafted": adasum * np.linalg.norm(mean) / np.linalg.norm(adasum),
    }
    for op, vector in expected.items():
        np.testing.assert_allclose(reduced(op, stacked), vector, rtol=1e-5, atol=1e-6)


def test_cancelling_directions_have_no_length():
    stacked = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert torch.equal(reduced("rda", stacked), torch.zeros(2))


def test_lengths_are_the_combinations():
    stacked = vectors(4, 7)
    weights = torch.rand(1, 4, generator=torch.Generator().manual_seed(0))
    found = lengths(gram([stacked]), weights.double())
    assert float(found) == pytest.approx(float((weights[0] @ stacked).norm()), rel=1e-5)


def test_adascale_multiplies_the_rate():
    """Its first step is the average's, times the gain of the first gradients."""
    start, average, scaled = (
        torch.cat([t.flatten() for t in train(replace(SGD, op=op, lr=lr), 1).weights])
        for op, lr in (("average", 0.0), ("average", 1e-3), ("adascale", 1e-3))
    )
    factor = (scaled - start).norm() / (average - start).norm()
    assert 1.5 < factor < 4
    torch.testing.assert_close(
        scaled - start, factor * (average - start), atol=1e-6, rtol=1e-2
    )


def test_adascale_warms_up_over_iterations_of_one_worker():
    """Johnson et al. 2020, algorithm 1: the rate is `gain(t) * lr(floor(sum of gains before))`."""
    setting = replace(SGD, op="adascale", lr=1e-3, warm_up=0.5, workers=4)
    job, plain = Job(setting), Job(replace(setting, op="average"))
    over = round(0.5 * job.horizon(1))
    assert over > 3 * round(0.5 * job.horizon(4)) > 4
    draws = job.work.draws(1, 4, job.work.batch)
    gains = 0.0
    for step in range(1, 4):
        assert job.warm_up() == min(1.0, (math.floor(gains) + 1) / over)
        assert plain.warm_up() == min(1.0, step / round(0.5 * plain.horizon(4)))
        before, examples = job.iterations, next(draws)
        job.step(examples, 1e-3, look=False)
        plain.step(examples, 1e-3, look=False)
        gains += job.iterations - before
    assert 1.5 * 3 < gains <= 4 * 3


def test_lars_by_hand():
    weights = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]])
    bias = torch.tensor([[3.0, 4.0]])
    optimizer = LARS([weights, bias], 0.1, momentum=0.5, weight_decay=0.0)
    for _ in range(2):
        weights.grad = torch.tensor([[[0.0, 2.0]], [[2.0, 2.0]]])
        bias.grad = torch.tensor([[0.0, 2.0]])
        optimizer.step()
    # |w| / |g| is 5 / 2, then |(3, 3.5)| / 2; a norm of 0 leaves the rate.
    second = 0.5 * 0.5 + 0.1 * math.hypot(3, 3.5)
    expected = [[3.0, 3.5 - second]]
    torch.testing.assert_close(weights[0], torch.tensor(expected))
    assert weights[1, 0, 0] < -0.2
    torch.testing.assert_close(bias, torch.tensor([[3.0, 4.0 - 0.2 - 0.3]]))


def test_lars_decays_no_bias():
    weights, bias = torch.ones(1, 2, 2), torch.ones(1, 2)
    optimizer = LARS([weights, bias], 0.1, weight_decay=1.0)
    for tensor in (weights, bias):
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    torch.testing.assert_close(weights, torch.full_like(weights, 0.9))
    assert torch.equal(bias, torch.ones(1, 2))


def test_lars_adds_the_norms_of_gradient_and_decay():
    """`|w| / (|g| + decay |w|)`, whatever the angle between the two (You et al., section 4.2)."""
    weights = torch.tensor([[[3.0, 4.0]]])
    optimizer = LARS([weights], 0.1, weight_decay=0.5)
    weights.grad = torch.tensor([[[-3.0, -4.0]]])
    optimizer.step()
    # The ratio is 5 / (5 + 2.5), and the update g + w / 2.
    left = 1 + 0.1 * (5 / 7.5) * 0.5
    torch.testing.assert_close(weights, torch.tensor([[[3.0 * left, 4.0 * left]]]))
