"""`adasum-hvd advise --demo`: small models on simulated workers, for real."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adasum_hvd import cli, reference
from adasum_hvd.distributed.adascale import AdaScale
from adasum_hvd.distributed.coefficients import adasum
from adasum_hvd.tools import torch_trial
from adasum_hvd.tools.torch_trial import Trial
from tests.unit.pages import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "advise_model.py"
MODEL = """
import torch
from torch import nn
def make():
    inputs = torch.randn(700, 6)
    targets = (inputs @ torch.randn(6, 3)).argmax(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return model, nn.CrossEntropyLoss(), {data}
"""
PAIRS = "list(zip(inputs, targets))"


def file_of(tmp_path: Path, text: str) -> Path:
    """Return a file with a name that Python's own packages have, too."""
    file = tmp_path / "test.py"
    file.write_text(text)
    return file


@pytest.fixture(params=["(inputs, targets)", PAIRS])
def trial(request: pytest.FixtureRequest, tmp_path: Path) -> Trial:
    file = file_of(tmp_path, MODEL.format(data=request.param))
    return Trial(file, "momentum", 8, 1)


def test_joint_gradients_are_the_references(trial: Trial) -> None:
    examples = next(trial._draws(4))
    flat = [trial._gradients(numbers) for numbers in examples]
    assert trial._join(examples, adasum) == 1.0
    for place, parameter in enumerate(trial._parameters):
        expected = reference.adasum([own[place].numpy() for own in flat])
        found = parameter.grad.flatten().double()
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-7)


def test_adascale_multiplies_the_rate_by_its_gain(trial: Trial) -> None:
    examples, rule = next(trial._draws(4)), AdaScale()
    rows = [torch.cat(trial._gradients(numbers)) for numbers in examples]
    gain = trial._join(examples, rule)
    same = AdaScale()
    squares = sum(float(row.square().sum()) for row in rows)
    mean = torch.stack(rows).mean(0)
    same.update(squares, float(mean.square().sum()), 4)
    assert 1 < gain < 4 and gain == pytest.approx(same.gain, rel=1e-5)
    found = torch.cat([parameter.grad.flatten() for parameter in trial._parameters])
    torch.testing.assert_close(found, mean)


def test_workers_share_each_epoch(trial: Trial) -> None:
    step = next(trial._draws(16))
    drawn = [number for row in step for number in row]
    assert len(set(drawn)) == 128 and set(drawn) <= set(trial._train.tolist())
    assert len(trial._train) + len(trial._held_out[1]) == 700


def test_runs_are_equal_again_and_end_at_the_target(trial: Trial) -> None:
    alone = trial.run(1, "Average", 0.03, math.inf, target=0.5)
    assert alone.loss == 0.5 and alone.steps == alone.taken > 10
    assert trial.run(1, "Average", 0.03, math.inf, target=0.5) == alone
    for name in torch_trial.RULES:
        found = trial.run(16, name, 0.03, math.inf, target=0.5)
        assert found.loss == 0.5 and 0 < found.steps < alone.steps, found
    least = trial.run(16, "AdaSum", 0.03, 0.0, target=0.0)
    assert (least.steps, least.taken) == (0, 1) and least.loss > 0.5
    first, only = trial._first, trial.run(1, "Average", 0.03, 0.0)
    assert (only.steps, only.taken) == (1, 1) and only.loss < first


def test_one_worker_sets_the_target(trial: Trial) -> None:
    """Of all rates that were tried the best one is taken; a diverged one never is."""
    (first_rate, alone), *others = torch_trial.measure(trial, None, 4)
    assert first_rate in torch_trial.RATES and alone.workers == 1 and alone.steps > 0
    rules = list(torch_trial.RULES)
    assert [(one.workers, one.rule) for _, one in others] == [
        (workers, rule) for workers in (4, 16) for rule in rules
    ]
    for rate, one in others:
        assert rate == first_rate and ((one.loss == alone.loss) == (one.steps > 0))
    with pytest.raises(
        ValueError, match=r"one worker's loss to fall .* pass a smaller --lr"
    ):
        list(torch_trial.measure(trial, 1e30, 60))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_the_example_prints_and_draws(
    optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    words = [
        "advise",
        "--demo",
        str(EXAMPLE),
        "--optimizer",
        optimizer,
        "--seconds",
        "3",
    ]
    assert cli.main([*words, "--lr", "0.01", "-o", str(tmp_path / "a.png")]) == 0
    shown = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) (any|A\w+) +>?\d+ ", shown, re.M)
    assert [count for count, _ in rows] == ["1", *["4"] * 3, *["16"] * 3], shown
    assert {rule for _, rule in rows[1:]} == torch_trial.RULES.keys()
    assert f"reached with {optimizer}\nat a rate of 0.01, the" in shown
    assert "Fewest steps with 16 workers:" in shown and "docs/choose.md" in shown
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupt_leaves_what_was_measured(tmp_path: Path) -> None:
    file = file_of(tmp_path, MODEL.format(data="(inputs, targets)"))
    words = [sys.executable, "-m", "adasum_hvd", "advise", "--demo", str(file)]
    words += ["--seconds", "8", "--lr", "0.03", "--output", str(tmp_path / "a.png")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as job:
        lines = []
        for line in job.stdout:
            lines.append(line)
            if line.split()[:2] == ["4", "AdaSum"]:
                os.kill(job.pid, signal.SIGINT)
    assert job.returncode == 128 + signal.SIGINT
    assert any(line.startswith("Fewest steps with 4 workers") for line in lines), lines


WRONG = {
    "x = 1": "KeyError: 'make'",
    "def make():\n    return 1, 2": r"not enough values to unpack .*\(line unknown\)",
    "def make():\n    raise OSError('no such data')": r"no such data \(line 2\)",
    "import no_such_module": r"No module named 'no_such_module' \(line 1\)",
    MODEL.format(data="iter(())"): r"TypeError: .* no len",
    MODEL.format(data="inputs"): r"too many values to unpack",
    MODEL.format(data=PAIRS).replace("nn.Cross", "None and nn.Cross"): r"NoneType",
    MODEL.format(data=PAIRS).replace("randn(700", "full((700").replace(
        "6)\n", "6), float('nan'))\n", 1
    ): r"a loss of nan before",
    MODEL.format(data=PAIRS).replace("model = ", "model = nn.ReLU() or "): "to train",
    MODEL.format(data=PAIRS + "[:100]"): r"89 examples to train on, fewer than the 128",
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_a_file_may_not_be(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = list(WRONG.items())[number]
    file = file_of(tmp_path, text)
    assert cli.main(["advise", "--demo", str(file), "--seconds", "1"]) == 1
    shown = capsys.readouterr()
    assert re.search(message, shown.err), shown.err
    assert shown.err.startswith("adasum-hvd advise: advise --demo: expected")
    assert shown.out == ""


def test_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--demo", str(tmp_path / "no.py")],
        ["--demo", str(EXAMPLE), "--lr", "0"],
    ):
        assert cli.main(["advise", *words]) == 1
        assert (
            "expected a file with make(), and --lr above 0" in capsys.readouterr().err
        )
    no_folder = str(tmp_path / "no" / "picture.png")
    for words, message in (
        (
            ["--demo", str(EXAMPLE), "-o", no_folder],
            "a picture in a folder that exists",
        ),
        (["a", "--optimizer", "adam", "--lr", "1"], "expected --lr with --demo only"),
    ):
        assert cli.main(["advise", *words]) == 1
        assert message in capsys.readouterr().err
    for words in ([], ["run.jsonl", "--demo", str(EXAMPLE)]):
        with pytest.raises(SystemExit):
            cli.main(["advise", *words])
