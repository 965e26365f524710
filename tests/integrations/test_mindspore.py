"""The real MindSpore next to this project: formula, arguments, order, checkpoints.

`make integrations` installs MindSpore in build/mindspore, because it needs another NumPy.
"""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adasum_hvd import mindspore_checkpoint
from adasum_hvd.adam_offload import AdamOffload
from tests.integrations import mindspore_forms as forms
from tests.parallel.harness.launch import REPOSITORY
from tests.unit import test_mindspore_checkpoint as checkpoints

PYTHON = REPOSITORY / "build" / "mindspore" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no build/mindspore")
# MindSpore's powers of the betas are products in float32; weights of a rate of 0.1.
FIRST, LAST = 3e-7, 3.1e-6
LOOSER = {"int rate": 2.5e-5, "large beta2": 2.8e-5}
RATES = {
    "generator": lambda numbers: (number for number in numbers),
    "tensor": torch.tensor,
    "exponential": lambda numbers: (
        lambda step: numbers[0] * numbers[1] ** (step / numbers[2])
    ),
    "cosine": lambda numbers: (
        lambda step: (
            numbers[0]
            + (numbers[1] - numbers[0])
            * (1 + math.cos(math.pi * min(step, numbers[2]) / numbers[2]))
            / 2
        )
    ),
    "polynomial": lambda numbers: (
        lambda step: (
            (numbers[0] - numbers[1])
            * (1 - min(step, numbers[2]) / numbers[2]) ** numbers[3]
            + numbers[1]
        )
    ),
}


def mindspore(*words: Any) -> None:
    """Run MindSpore's program."""
    program = Path(__file__).with_name("mindspore_program.py")
    command = [str(PYTHON), str(program), *map(str, words)]
    environment = {**os.environ, "GLOG_v": "3", "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("mindspore") / "forms.npz"
    mindspore("forms", path)
    return np.load(path)


def optimizer_of(form: dict[str, Any], made: dict[str, torch.nn.Parameter]) -> Any:
    """Return this project's AdamOffload with a form's arguments."""
    options = {"learning_rate": forms.RATE, **form}
    groups, order = options.pop("groups", None), options.pop("order", None)
    for name, value in options.items():
        if isinstance(value, tuple) and isinstance(value[0], str):
            options[name] = RATES[value[0]](value[1])
    params: list[Any] = [*made.items()]
    if groups:
        params = [{**g, "params": [made[name] for name in g["params"]]} for g in groups]
        if order:
            params.append({"order_params": [made[name] for name in order]})
    return AdamOffload(params, verbose=False, **options)


@pytest.mark.parametrize("title", forms.FORMS)
def test_form(title: str, expected: Any) -> None:
    form = forms.FORMS[title]
    made = {
        name: torch.nn.Parameter(torch.tensor(values))
        for name, values in forms.weights().items()
    }
    optimizer = optimizer_of(form, made)
    ordered = [made[name] for name in forms.order_of(form)]
    assert [*map(id, ordered)] == [*map(id, optimizer.update_order()[::-1])]
    for step in range(forms.STEPS):
        for name, values in forms.gradients(step).items():
            made[name].grad = torch.tensor(values)
        optimizer.step()
        if step in (0, forms.STEPS - 1):
            most = LOOSER.get(title, FIRST if step == 0 else LAST)
            for name, parameter in made.items():
                np.testing.assert_allclose(
                    parameter.detach().numpy(),
                    expected[f"{title}/{step}/{name}"],
                    rtol=0,
                    atol=most,
                    err_msg=f"{name} after step {step}",
                )


def test_the_committed_checkpoint_is_what_mindspore_writes(tmp_path: Path) -> None:
    paths = tmp_path / "first.ckpt", tmp_path / "later.ckpt"
    mindspore("write", *paths)
    for path, committed in zip(
        paths, (checkpoints.FIRST, checkpoints.LATER), strict=True
    ):
        written = mindspore_checkpoint.read(path)
        known = mindspore_checkpoint.read(committed)
        assert [e[:3] for e in written.values()] == [e[:3] for e in known.values()]
        for name, entry in written.items():
            if entry.dtype != "str":
                actual = entry.array()
                np.testing.assert_allclose(actual, known[name].array(), atol=1e-6)


def test_mindspore_resumes_from_our_checkpoint(tmp_path: Path) -> None:
    model, optimizer = checkpoints.training()
    mindspore_checkpoint.load(checkpoints.FIRST, model, optimizer)
    mindspore_checkpoint.save(tmp_path / "ours.ckpt", model, optimizer)
    mindspore("resume", tmp_path / "ours.ckpt", tmp_path / "later.ckpt")
    actual = mindspore_checkpoint.read(tmp_path / "later.ckpt")
    for name, entry in mindspore_checkpoint.read(checkpoints.LATER).items():
        np.testing.assert_allclose(
            actual[name].array(), entry.array(), atol=1e-6, err_msg=name
        )
