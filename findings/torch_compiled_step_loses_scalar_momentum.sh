#!/usr/bin/env bash
# torch 2.13.0: in a training step that is compiled whole (backward and optimizer in one function), the
# momentum of a parameter without dimensions, such as a logit scale or temperature, stays that of the
# first step. There is no error. Backend "aot_eager" is wrong, too, and a parameter of one element
# right. torch 2.15.0 is right.
#
# Expected: the same parameter after each step, compiled or not.
# Seen (2026-11-29), after each of three steps:
#     shape (), plain: 0.700 0.030 -1.073
#     shape (), compiled: 0.700 0.430 0.187
#     shape (1,), plain: 0.700 0.030 -1.073
#     shape (1,), compiled: 0.700 0.030 -1.073
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PYTHON'
import torch


def step(parameter, optimizer, inputs):
    optimizer.zero_grad()
    (parameter * inputs).sum().backward()
    optimizer.step()


for shape in (), (1,):
    for title, run in (
        ("plain", step),
        ("compiled", torch.compile(step, backend="aot_eager")),
    ):
        parameter = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        values = []
        for number in range(3):
            inputs = torch.tensor([1.0 + number, 2.0], dtype=torch.float64)
            run(parameter, optimizer, inputs)
            values.append(f"{parameter.item():.3f}")
        print(f"shape {shape}, {title}: {' '.join(values)}")
PYTHON
environment/bin/python program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
shape (), plain: 0.700 0.030 -1.073
shape (), compiled: 0.700 0.430 0.187
shape (1,), plain: 0.700 0.030 -1.073
shape (1,), compiled: 0.700 0.030 -1.073
SEEN
