#!/usr/bin/env bash
# bitsandbytes 0.50.0 with torch 2.13.0: `optim.PytorchLARS` with a group whose momentum is 0, its
# default, steps each parameter of it by the update of the parameter before: its own gradient is
# not looked at. If no parameter came before, the step raises UnboundLocalError, and that is known:
# https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2079 (a mend is in pull/2082)
#
# Expected: the group without momentum is stepped by its gradients, 1 - 0.1 * (-5, 0, 5).
# Seen (2026-11-28), weights of 1 after a step at a rate of 0.1, without a limit of the norm:
#     momentum 0.9, gradient [1.0, 2.0, 3.0]: [0.9, 0.8, 0.7]
#     momentum 0.0, gradient [-5.0, 0.0, 5.0]: [0.9, 0.8, 0.7]
#     momentum 0.0 alone: UnboundLocalError
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 bitsandbytes==0.50.0 numpy
cat > program.py <<'PYTHON'
import torch
from bitsandbytes.optim import PytorchLARS

with_momentum, without = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
with_momentum.grad = torch.tensor([1.0, 2.0, 3.0])
without.grad = torch.tensor([-5.0, 0.0, 5.0])
groups = [
    {"params": [with_momentum], "momentum": 0.9},
    {"params": [without], "momentum": 0.0},
]
PytorchLARS(groups, lr=0.1, max_unorm=0.0).step()
for group in groups:
    weight = group["params"][0]
    now = [round(one, 4) for one in weight.tolist()]
    print(f"momentum {group['momentum']}, gradient {weight.grad.tolist()}: {now}")
try:
    PytorchLARS([without], lr=0.1).step()
except UnboundLocalError as error:
    print(f"momentum 0.0 alone: {type(error).__name__}")
PYTHON
environment/bin/python program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
momentum 0.9, gradient [1.0, 2.0, 3.0]: [0.9, 0.8, 0.7]
momentum 0.0, gradient [-5.0, 0.0, 5.0]: [0.9, 0.8, 0.7]
momentum 0.0 alone: UnboundLocalError
SEEN
