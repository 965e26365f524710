"""MindSpore's side of test_mindspore.py, for an environment with MindSpore 2.10.0 alone.

    mindspore_program.py forms OUT.npz            # trains every form of arguments
    mindspore_program.py write A.ckpt B.ckpt      # a checkpoint, and one of some steps later
    mindspore_program.py resume A.ckpt B.ckpt     # from a checkpoint: that of some steps later

`write` made the files in tests/unit/mindspore.
"""

from __future__ import annotations

import sys
from typing import Any

import mindspore as ms
import mindspore_forms as forms
import numpy as np
from mindspore import Parameter, Tensor, nn

LATER = 5  # steps
RATES = {
    "generator": lambda numbers: (number for number in numbers),
    "tensor": lambda numbers: Tensor(numbers, ms.float32),
    "exponential": lambda numbers: nn.ExponentialDecayLR(*numbers),
    "cosine": lambda numbers: nn.CosineDecayLR(*numbers),
    "polynomial": lambda numbers: nn.PolynomialDecayLR(*numbers),
}


def optimizer_of(form: dict[str, Any], made: dict[str, Parameter]) -> Any:
    """Return MindSpore's AdamOffload with a form's arguments."""
    options = {"learning_rate": forms.RATE, **form}
    groups, order = options.pop("groups", None), options.pop("order", None)
    for name, value in options.items():
        if isinstance(value, tuple) and isinstance(value[0], str):
            options[name] = RATES[value[0]](value[1])
    params: list[Any] = [*made.values()]
    if groups:
        params = [{**g, "params": [made[name] for name in g["params"]]} for g in groups]
        if order:
            params.append({"order_params": [made[name] for name in order]})
    return nn.AdamOffload(params, **options)


def train_forms(out: str) -> None:
    """Save the weights after the first and the last step, by form and name."""
    results = {}
    for title, form in forms.FORMS.items():
        made = {n: Parameter(Tensor(w), name=n) for n, w in forms.weights().items()}
        optimizer = optimizer_of(form, made)
        for step in range(forms.STEPS):
            given = forms.gradients(step)
            optimizer(tuple(Tensor(given[name]) for name in forms.order_of(form)))
            if step in (0, forms.STEPS - 1):
                for name, parameter in made.items():
                    results[f"{title}/{step}/{name}"] = parameter.asnumpy().copy()
    np.savez(out, **results)


class Net(nn.Cell):
    """A dense layer, a normalization and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(3, 4)
        self.bn = nn.BatchNorm1d(4)
        self.table = nn.Embedding(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        """Return the output."""
        return self.bn(self.fc(x))


def training() -> tuple[Net, Any]:
    """Return the network and its optimizer, with fixed weights."""
    net = Net()
    for index, parameter in enumerate(net.get_parameters()):
        values = np.sin(np.arange(parameter.size) + index).reshape(parameter.shape)
        parameter.set_data(Tensor(values.astype(np.float32)))
    params = net.trainable_params()
    return net, nn.AdamOffload(params, learning_rate=0.01, weight_decay=0.1)


def steps(optimizer: Any, first: int, count: int) -> None:
    """Take steps; the gradients are a function of the step."""
    for step in range(first, first + count):
        optimizer(
            tuple(
                Tensor(np.cos(np.arange(p.size) + step).reshape(p.shape), ms.float32)
                for p in optimizer.parameters
            )
        )


def write(first: str, later: str) -> None:
    """Train, and save two checkpoints; the first with entries of other kinds too."""
    net, optimizer = training()
    steps(optimizer, 0, LATER)
    others = {
        "epoch_num": 3,
        "note": "café",
        "single": Parameter(Tensor(np.float32(2.5)), name="single"),
        "brain": Tensor(np.array([1.0, -2.5]), ms.bfloat16),
        "half": Tensor(np.array([0.1]), ms.float16),
    }
    ms.save_checkpoint(
        nn.TrainOneStepCell(net, optimizer), first, append_dict=others, crc_check=True
    )
    steps(optimizer, LATER, LATER)
    ms.save_checkpoint(nn.TrainOneStepCell(net, optimizer), later)


def resume(first: str, later: str) -> None:
    """Load a checkpoint strictly, train, and save the next one."""
    net, optimizer = training()
    entries = ms.load_checkpoint(first)
    for cell in (net, optimizer):
        lacking, _ = ms.load_param_into_net(cell, entries, strict_load=True)
        assert set(lacking) <= {"learning_rate"}, lacking
    steps(optimizer, LATER, LATER)
    ms.save_checkpoint(nn.TrainOneStepCell(net, optimizer), later)


if __name__ == "__main__":
    {"forms": train_forms, "write": write, "resume": resume}[sys.argv[1]](*sys.argv[2:])
