"""AdaScale's gain and schedule against the paper's formulas, and rules by name."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from adasum_hvd.distributed.adascale import AdaScale, AdaScaleLR
from adasum_hvd.distributed.rules import FUNCTIONS, Rule, rule_of


def scaled(*steps: tuple[float, float], ranks: int) -> AdaScale:
    """Return AdaScale after steps of (sum of squares, square of the mean)."""
    rule = AdaScale()
    for step in steps:
        rule.update(*step, ranks)
    return rule


def test_gain_from_one_to_the_number_of_ranks():
    """Equal gradients: 1. Noise only: N. In between: the formula, by hand."""
    assert scaled(ranks=1).gain == 1
    assert scaled((8.0, 1.0), ranks=8).gain == 1
    assert scaled((8.0, 1 / 8), ranks=8).gain == pytest.approx(8)
    # sum |g|^2 = 10 and |mean|^2 = 2 of 4: variance 2/3, squared mean 2 - 1/6.
    found = scaled((10.0, 2.0), ranks=4)
    assert (found.variance, found.squared_mean) == pytest.approx((2 / 3, 2 - 1 / 6))
    assert found.gain == pytest.approx((2 / 3 + 11 / 6) / 2)


@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0, 50.0])
def test_gain_of_drawn_gradients(ranks: int, noise: float) -> None:
    """The paper's proposition: gains are those of the true variance and mean."""
    generator = torch.Generator().manual_seed(0)
    gradients = 1 + noise**0.5 * torch.randn(20_000, ranks, generator=generator)
    squares = float(gradients.square().sum(1).mean())
    squared_mean = float(gradients.mean(1).square().mean())
    expected = (noise + 1) / (noise / ranks + 1)
    assert scaled((squares, squared_mean), ranks=ranks).gain == pytest.approx(
        expected, rel=0.05
    )


def test_matrices_of_several_tensors_and_devices_add_up():
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(4, n, generator=generator).double() for n in (3, 50, 7)]
    rule = AdaScale()
    grams = torch.stack([one @ one.T for one in tensors])
    rule.begin_pass()
    for part in (grams[:1], grams[1:]):
        assert torch.equal(rule(part), torch.full_like(part[:, 0], 0.25))
    rule.end_pass()
    whole = torch.cat(tensors, 1)
    by_hand = scaled(
        (float(whole.square().sum()), float(whole.mean(0).square().sum())), ranks=4
    )
    assert rule.gain == pytest.approx(by_hand.gain, rel=1e-12)
    rule(1e9 * grams)  # a pass that breaks off
    rule.begin_pass()
    assert rule.gain == pytest.approx(by_hand.gain, rel=1e-12)


def test_the_average_of_few_steps_is_their_mean():
    steps = [(8.0, 1.0), (10.0, 1.0), (9.0, 1.2)]
    singles = [scaled(step, ranks=4) for step in steps]
    found = scaled(*steps, ranks=4)
    assert found.variance == pytest.approx(sum(one.variance for one in singles) / 3)
    means = [one.squared_mean for one in singles]
    assert found.squared_mean == pytest.approx(sum(means) / 3)


def test_the_average_keeps_what_the_paper_says():
    """Appendix B.3: `max(0, 1 - S / 1000)` of the past."""
    old, new = (10.0, 2.0), (4.0, 1.0)
    past = scaled(*[old] * 100, new, ranks=100)
    alone = scaled(old, ranks=100).variance, scaled(new, ranks=100).variance
    assert past.variance == pytest.approx(0.9 * alone[0] + 0.1 * alone[1])
    last = scaled(*[(10.0, 2.0)] * 9, (4.0, 0.004), ranks=1000)
    assert last.variance == pytest.approx(scaled((4.0, 0.004), ranks=1000).variance)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_that_is_not_finite_changes_nothing(value: float) -> None:
    rule = scaled((10.0, 2.0), ranks=4)
    before = rule.gain
    rule.update(value, 2.0, 4)
    assert rule.gain == before and rule.count == 1


def training(lr: float = 0.1, schedule=lambda step: 1.0 / (1 + step)):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr)
    state = SimpleNamespace(rule=Rule("adascale"))
    return weight, optimizer, state, AdaScaleLR(optimizer, state, schedule)


def step(weight, optimizer, state, scheduler, squared_mean: float) -> None:
    state.rule.adascale.update(4.0, squared_mean, 4)
    weight.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()


def test_a_schedule_counts_gained_steps():
    """Algorithm 1: the rate is `gain(t) * lr(floor(sum of gains before))`."""
    parts = training()
    weight, optimizer, state, scheduler = parts
    gained = expected = 0.0
    for squared_mean in (0.3, 0.9, 0.25, 0.5):
        rate = 0.1 / (1 + math.floor(gained))
        assert optimizer.param_groups[0]["lr"] == rate
        step(*parts, squared_mean)
        gained += state.rule.adascale.gain
        expected -= rate * state.rule.adascale.gain
        assert scheduler.gained == gained
        assert float(weight.detach()) == pytest.approx(expected)
    assert gained > 6


def test_a_schedule_goes_on_from_a_checkpoint(tmp_path):
    parts = training()
    for squared_mean in (0.3, 0.9):
        step(*parts, squared_mean)
    torch.save([parts[1].state_dict(), parts[3].state_dict()], tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = training()
    with torch.no_grad():
        again[0].copy_(parts[0])
    again[1].load_state_dict(saved[0])
    again[3].load_state_dict(saved[1])
    for one in (parts, again):
        step(*one, 0.5)
    assert torch.equal(parts[0], again[0])
    assert parts[3].gained == again[3].gained and parts[3].get_lr() == again[3].get_lr()


def test_a_lone_rank_that_resumes_has_no_gain():
    rule = AdaScale()
    rule.load_state_dict(scaled((10.0, 2.0), ranks=4).state_dict())
    assert rule.gain == 1 and rule.variance == pytest.approx(2 / 3)


def test_a_step_that_only_makes_state_is_not_counted():
    weight, optimizer, state, scheduler = training()
    state.rule.adascale.update(4.0, 0.3, 4)
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    get_optimizer_state_dict(model, optimizer)
    assert scheduler.gained == 0 and optimizer.param_groups[0]["lr"] == 0.1


def test_an_optimizer_whose_hooks_run_twice_is_scaled_once():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    weight = torch.nn.Parameter(torch.zeros(1))
    state = SimpleNamespace(rule=Rule("adascale"))
    optimizer = Twice([weight], 0.1)
    scheduler = AdaScaleLR(optimizer, state)
    step(weight, optimizer, state, scheduler, 0.3)
    gain = state.rule.adascale.gain
    assert float(weight.detach()) == pytest.approx(-0.1 * gain)
    assert scheduler.gained == gain and optimizer.param_groups[0]["lr"] == 0.1


def test_only_adascale_has_a_gain():
    for name in FUNCTIONS:
        rule = rule_of(name, None, None)
        assert rule.name == name and rule.described["rule"] == name
        if name != "adascale":
            with pytest.raises(ValueError, match=rf"expected rule='adascale'.*={name}"):
                assert rule.adascale
    assert Rule("adascale").function is not Rule("adascale").function
    with pytest.raises(ValueError, match=r"expected one without a gain"):
        rule_of("adascale", None, None, has_passes=False)


def test_the_order_of_buckets_does_not_change_a_bit_of_the_gain():
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(3, 9, generator=generator).double() for _ in range(9)]
    parts = [(one @ one.T)[None] for one in tensors]
    gains = set()
    for shift in range(9):
        rule = AdaScale()
        for part in parts[shift:] + parts[:shift]:
            rule(part)
        rule.end_pass()
        gains.add(rule.gain)
    assert len(gains) == 1


def test_a_group_size_of_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("ADASUM_HVD_GROUP_SIZE", "-2")
    with pytest.raises(ValueError, match=r"ADASUM_HVD_GROUP_SIZE: .* but got '-2'"):
        rule_of("adasum", None, None)
    assert rule_of("mean", None, None).group_size == 0
