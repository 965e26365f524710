#!/usr/bin/env bash
# torch 2.13.0: `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` of an AdamW that
# has not stepped yet changes the training that follows. To make a state it takes a step with
# gradients and a rate of zero, and leaves Adam's count of steps at 1. The bias correction of the
# first real step is that of a second one: the step is a quarter shorter.
#
# Expected: reading changes nothing. Trainers read the state to save a checkpoint before training.
# Seen (2026-11-27), the change of a weight whose gradient is 1, at a rate of 0.1, and the count:
#     not read: -0.1000, 1
#     read: -0.0744, 2
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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

for read in (False, True):
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    if read:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    change = (model.weight.detach() - before)[0, 0].item()
    count = int(optimizer.state[model.weight]["step"])
    print(f"{'read' if read else 'not read'}: {change:.4f}, {count}")
PYTHON
environment/bin/python program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
not read: -0.1000, 1
read: -0.0744, 2
SEEN
