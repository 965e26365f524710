"""Advice from a run's records: the noise scale, and the reduction that it names."""

from __future__ import annotations

import doctest
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from adasum_hvd import cli
from adasum_hvd.advice import run as advice
from adasum_hvd.base import ops
from adasum_hvd.monitor.files import records
from adasum_hvd.monitor.noise import Noise, noise_of
from adasum_hvd.monitor.statistics import statistics
from tests.unit.pages import REPOSITORY

N, VARIANCE, SQUARED_MEAN = 8, 30.0, 2.0


def tensor(variance: float, squared_mean: float, length: float, gain: float) -> dict:
    return {
        "orthogonality": 0.5, "variance": variance, "squared_mean": squared_mean,
        "length": length, "gain": gain,
    }  # fmt: skip


def record(step: int = 1, joined: int = 32, **tensors: dict) -> dict:
    return {"step": step, "joined": joined, "inputs": "gradients", "tensors": tensors}


LONG = record(a=tensor(30.0, 1.0, 3.0, 6.0), b=tensor(10.0, 0.0, 4.0, 2.0))
SHORT = record(a=tensor(1.0, 1.0, 3.0, 1.1))


def test_the_noise_is_a_ratio_of_sums():
    noise = noise_of([LONG, record(2, a=tensor(20.0, 2.0, 3.0, 6.0))])
    assert noise.scale == (30 + 10 + 20) / (1 + 0 + 2)
    # 9 + 16 + 9 over 0.25 + 4 + 0.25.
    assert noise.lengthening == pytest.approx(math.sqrt(34 / 4.5))
    assert noise.speedup(32) == pytest.approx(21 / (1 + 20 / 32))


def test_only_noise_is_worth_every_worker():
    only_noise = Noise(8, 4.0, -0.5, 1.0, 1.0)
    assert math.isinf(only_noise.scale) and only_noise.speedup(8) == 8
    no_noise = Noise(8, 0.0, 4.0, 1.0, 1.0)
    assert no_noise.scale == 0 and no_noise.speedup(8) == 1
    assert math.isnan(Noise(8, 0.0, 0.0, 0.0, 0.0).lengthening)
    assert only_noise.has_gradients and no_noise.has_gradients
    # The ranks' gradients cancel out: a scale, but no length to compare.
    assert not Noise(8, 4.0, -0.5, 0.0, 0.0).has_gradients


def test_the_estimates_are_unbiased():
    """The monitor's rows of random gradients give the moments that they were drawn with."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((30,), (SQUARED_MEAN / 30) ** 0.5, dtype=torch.float64)
    drawn = torch.randn(3000, N, 30, dtype=torch.float64, generator=generator)
    rows = mean + (VARIANCE / 30) ** 0.5 * drawn
    squares, means = rows.square().sum((1, 2)).sqrt(), rows.mean(1).norm(dim=1)
    zeros = torch.zeros(3000, 2 + N, dtype=torch.float64)
    columns = [zeros[:, :2], squares[:, None], means[:, None], means[:, None]]
    found = statistics(torch.cat([*columns, zeros[:, 2:]], 1).numpy(), [N])
    assert np.mean(found["variance"]) == pytest.approx(VARIANCE, rel=0.02)
    assert np.mean(found["squared_mean"]) == pytest.approx(SQUARED_MEAN, rel=0.1)


def test_the_answer_has_the_figures():
    found = advice.advise([LONG] * 6, optimizer="momentum")
    assert found.use is ops.AdasumGrad and found.workers == 32
    assert found.speedup == pytest.approx(41 / 2.25)
    assert found.noise_scale == pytest.approx(40)
    text = str(found)
    assert "in batches of one worker, is 40 in the first third" in text
    assert "acts like Average at 2.43 times the learning rate" in text
    assert "about 18.2 times fewer steps" in text and "about 40 workers" in text
    assert "rests on 6 records" in text
    assert "records" not in str(advice.advise([LONG] * 30, optimizer="momentum"))
    assert "use AdasumGrad" in text and "changes" not in text
    assert "adasum 103 ± 13, mean_direction 106 ± 23, adascale 111 ± 26, rda" in text


def test_the_speedup_is_the_mean_over_three_parts():
    """A part with large gradients counts as much as another, but within a part sums do."""
    loud = record(a=tensor(2e6, 1e6, 3.0, 6.0))
    found = advice.advise([LONG, LONG, loud, LONG, LONG, LONG], optimizer="momentum")
    quiet, mixed = 41 / 2.25, (1 + 2000040 / 1000001) / (1 + 2000040 / 1000001 / 32)
    assert found.speedup == pytest.approx((2 * quiet + mixed) / 3)
    assert advice.scale_of(found.speedup, 32) == found.noise_scale


def test_noisy_records_are_not_biased():
    """With 2 workers, where a third of the steps show no mean at all, as with 8."""
    rng = np.random.default_rng(0)
    for workers, expected in ((2, 21 / (1 + 20 / 2)), (8, 21 / (1 + 20 / 8))):
        rows = rng.standard_normal((300, workers, 10)) * math.sqrt(20 / 10)
        rows[:, :, 0] += 1
        means = np.square(rows.mean(1)).sum(1)
        variances = (np.square(rows).sum((1, 2)) - workers * means) / (workers - 1)
        values = zip(variances, means - variances / workers, strict=True)
        run = [record(joined=workers, a=tensor(v, m, 3.0, 2.0)) for v, m in values]
        assert (
            workers > 2 or sum(r["tensors"]["a"]["squared_mean"] <= 0 for r in run) > 60
        )
        found = advice.advise(run, optimizer="momentum")
        assert found.speedup == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("optimizer", "workers", "expected"),
    [
        ("momentum", 2, r"has 2 workers .* equal: adasum, adascale\. All"),
        (
            "momentum",
            500,
            r"has 128 .* equal: adasum, adascale\. All: adasum 72 ± 11, ",
        ),
        ("adam", 32, r"per byte, .* equal: adascale, adasum, mean_direction\. "),
        (
            "adamw",
            64,
            r"adascale 162 ± 5, mean_direction 164 ± 9, adasum 164 ± 9, mean 185",
        ),
    ],
)
def test_the_best_rules_of_the_nearest_row_are_named(
    optimizer: str, workers: int, expected: str
):
    run = [record(joined=workers, a=tensor(40.0, 1.0, 8.0, 8.0))]
    assert re.search(expected, str(advice.advise(run, optimizer=optimizer)))
    short = [record(joined=workers, a=tensor(1.0, 1.0, 1.1, 1.1))]
    assert "AdasumState" not in str(advice.advise(short, optimizer=optimizer))


def test_unusable_values_are_left_out_and_zeros_are_refused():
    nan = record(a=tensor(math.nan, 1.0, 3.0, 6.0))
    endless = record(a=tensor(1.0, 1.0, 3.0, math.inf))
    zero = record(a=tensor(0.0, 0.0, 0.0, 0.0))
    expected = advice.advise([LONG, LONG], optimizer="momentum")
    huge = record(a=tensor(1.0, 1.0, 1e200, 1.0))
    tiny = record(a=tensor(1.0, 1.0, 1.0, 1e-200))
    for other in (nan, endless, huge, tiny):
        assert advice.advise([LONG, other, LONG], optimizer="momentum") == expected
    found = advice.advise([LONG, zero, LONG], optimizer="momentum")
    assert found.speedup == expected.speedup
    with pytest.raises(ValueError, match="advise: expected records of gradients"):
        advice.advise([zero], optimizer="momentum")
    with pytest.raises(ValueError, match="expected records with the values variance"):
        advice.advise([nan], optimizer="momentum")


def test_other_numbers_of_workers():
    alone = r"of one number of workers, 2 or more, but got 1;"
    with pytest.raises(ValueError, match=alone):
        advice.advise([LONG | {"joined": 1}], optimizer="momentum")
    with pytest.raises(ValueError, match="2 or more, but got 8, 32;"):
        advice.advise([LONG, LONG | {"joined": 8}], optimizer="momentum")
    with pytest.raises(ValueError, match="in record 2, but got KeyError: 'joined'"):
        advice.advise([LONG, {"tensors": {}}], optimizer="momentum")
    for wrong in ("1.0", [1.0], {}):
        other = record(a=tensor(wrong, 1.0, 3.0, 2.0))
        with pytest.raises(
            ValueError, match="in record 1, but got ValueError: variance="
        ):
            advice.advise([other], optimizer="momentum")
    with pytest.raises(ValueError, match=r"but got TypeError: .* integer"):
        advice.advise([LONG | {"joined": math.inf}], optimizer="momentum")
    for wrong in ({"joined": 2.5}, {"joined": 0}, {"ranks": [1]}, {"joined": "4"}):
        with pytest.raises(
            ValueError, match=r"expected a record of hvd\.AdasumMonitor"
        ):
            advice.advise([LONG | wrong], optimizer="momentum")
    with pytest.raises(ValueError, match="OverflowError"):
        advice.advise([record(a=tensor(10**400, 1, 3, 2))], optimizer="momentum")
    groups = advice.advise([LONG | {"ranks": 256}] * 10, optimizer="momentum")
    assert "With 32 groups of 8 ranks" in str(groups)
    assert "Up to about 40 groups are worth having" in str(groups)
    assert "may be wrong by a factor of 2" in str(groups)
    longer = advice.advise([LONG] * advice.FEW, optimizer="momentum")
    assert "off by more than 15% in two of five runs" in str(longer)


def test_one_runs_estimates_are_as_good_as_it_says():
    tables = (REPOSITORY / "docs/convergence/tables.md").read_text()
    (near, runs) = re.findall(r"advice from a single run, (\d+) of (\d+)\.", tables)[0]
    assert 1 - int(near) / int(runs) == pytest.approx(2 / 5, abs=0.05)


@pytest.mark.parametrize(
    ("optimizer", "length", "use"),
    [
        ("momentum", 1.4, ops.Average),
        ("momentum", 1.6, ops.AdasumGrad),
        ("adamw", 5, ops.Average),
        ("adamw", 7.5, ops.AdasumGrad),
    ],
)
def test_the_choice_is_that_of_the_runs(
    optimizer: str, length: float, use: ops.ReduceOp
):
    """docs/convergence.md: with AdamW, 5 times is equal, and 10 is better."""
    found = advice.advise(
        [record(a=tensor(40.0, 1.0, length, length))], optimizer=optimizer
    )
    assert found.lengthening == pytest.approx(length)
    assert found.use is use


def test_more_workers_help_up_to_a_quarter_of_the_noise_scale():
    for scale, more in ((100.0, False), (160.0, True)):  # 32 workers
        found = advice.advise(
            [record(a=tensor(scale, 1.0, 8.0, 5.0))], optimizer="momentum"
        )
        assert ("More workers are worth adding" in str(found)) == more


def test_the_latest_run_of_a_file(tmp_path: Path):
    """A run begins where steps fall or the number of workers changes; a last line may be torn."""
    file = tmp_path / "run.jsonl"
    first, second = LONG | {"step": 50, "joined": 8}, LONG | {"step": 100}
    whole = json.dumps(first) + "\n" + json.dumps(second) + "\n"
    file.write_text(whole + json.dumps(second)[:30])
    assert records(file) == [second]
    file.write_text(whole + json.dumps(second)[:30] + "\n")
    with pytest.raises(ValueError, match=r"expected a record .* in line 3 of"):
        records(file)
    file.write_text(whole + json.dumps(LONG | {"step": 60}) + "\n")
    assert [each["step"] for each in records(file)] == [60]
    file.write_text(
        json.dumps(second) + "\n" + json.dumps(second | {"ranks": 8}) + "\n"
    )
    assert records(file) == [second | {"ranks": 8}]
    again = second | {"note": "the same step again"}
    file.write_text(json.dumps(second) + "\n" + json.dumps(again) + "\n")
    assert records(file) == [again]


def test_average_is_named_if_it_is_as_good():
    found = advice.advise([SHORT], optimizer="momentum")
    assert found.use is ops.Average and "hardly longer" in str(found)
    assert "Up to about 1 worker is worth having" in str(found)
    for optimizer in ("adamw", torch.optim.AdamW([torch.ones(1)])):
        found = advice.advise([LONG], optimizer=optimizer)
        assert found.use is ops.Average and "Use Average: it is as good" in str(found)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_gains_a_tenth_where_the_steps_are_much_longer(optimizer: str):
    longer = record(a=tensor(40.0, 1.0, 8.0, 8.0))  # 8 times the mean
    found = advice.advise([longer], optimizer=optimizer)
    assert found.lengthening == 8
    assert found.use is ops.AdasumGrad
    assert "most of that factor is lost" in str(found)
    assert "about a tenth fewer steps" in str(found)
    assert ("none compares the two with Adam" in str(found)) == (optimizer == "adam")


def test_a_run_without_a_common_gradient():
    found = advice.advise([record(a=tensor(9.0, -1.0, 3.0, 2.0))], optimizer="momentum")
    assert "too large to measure" in str(found)
    assert "More workers are worth adding" in str(found)
    scarce = record(a=tensor(1e9, 1.0, 3.0, 2.0))
    assert "Up to" not in str(advice.advise([scarce], optimizer="momentum"))


def test_changes_of_weights_are_named():
    found = advice.advise([LONG | {"inputs": "changes"}], optimizer="momentum")
    assert "records are of weight changes" in str(found)


def test_the_command_prints_the_answer(tmp_path: Path, capsys):
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(LONG | {"step": k}) + "\n" for k in (1, 2, 3)))
    assert cli.main(["advise", str(file), "--optimizer", "momentum"]) == 0
    assert capsys.readouterr().out.strip() == str(
        advice.advise(file, optimizer="momentum")
    )
    old = record(a={"orthogonality": 0.5, "gain": 2.0})
    file.write_text(json.dumps(old) + "\n")
    assert cli.main(["advise", str(file), "--optimizer", "adamw"]) == 1
    assert "record the run again" in capsys.readouterr().err
    assert cli.main(["advise", str(tmp_path / "no"), "--optimizer", "adam"]) == 1
    assert cli.main(["advise", str(file)]) == 1
    assert "expected --optimizer momentum, adam, adamw" in capsys.readouterr().err


def test_an_unknown_optimizer():
    with pytest.raises(ValueError, match=r"optimizer: expected one of .* got 'lion'"):
        advice.advise([LONG], optimizer="lion")
    with pytest.raises(
        ValueError, match="expected SGD, Adam or AdamW, but got RMSprop"
    ):
        advice.advise([LONG], optimizer=torch.optim.RMSprop)


def test_examples_run():
    outcome = doctest.testmod(advice)
    assert outcome.attempted > 0 and outcome.failed == 0
