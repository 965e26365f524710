#!/usr/bin/env bash
# torch 2.13.0: after a forward pass under torch.no_grad(), such as an evaluation, the model's
# zero_grad() leaves the gradients of the root that fully_shard() has made. The root's parameters stay
# gathered until a backward pass, so the model has other parameters than the optimizer, without a
# gradient. The next backward pass adds to the old gradient, without a word: the first step after each
# evaluation is one of two batches. The optimizer's zero_grad() is right, and so are layers with a
# fully_shard() of their own.
#
# Expected: the same gradients from model.zero_grad() and optimizer.zero_grad(), which have the same
# parameters here.
# Seen (2026-11-29), the same batch in each step, so that all gradients should be equal:
#     no evaluation, optimizer.zero_grad(): 2.0 2.0
#     no evaluation, model.zero_grad(): 2.0 2.0
#     evaluation between, optimizer.zero_grad(): 2.0 2.0
#     evaluation between, model.zero_grad(): 2.0 4.0
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
twos = torch.full((1, 1), 2.0)
for evaluates in (False, True):
    for whose in ("optimizer", "model"):
        model = torch.nn.Linear(1, 1, bias=False)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(2):
            if step and evaluates:
                with torch.no_grad():
                    model(twos)
            (optimizer if whose == "optimizer" else model).zero_grad()
            model(twos).sum().backward()
            optimizer.step()
            found.append(str(optimizer.param_groups[0]["params"][0].grad.full_tensor().item()))
        title = "evaluation between" if evaluates else "no evaluation"
        print(f"{title}, {whose}.zero_grad(): {' '.join(found)}")
PYTHON
environment/bin/python program.py "$folder" 2> log | tee found
diff found - << 'SEEN' || { cat log; exit 1; }
no evaluation, optimizer.zero_grad(): 2.0 2.0
no evaluation, model.zero_grad(): 2.0 2.0
evaluation between, optimizer.zero_grad(): 2.0 2.0
evaluation between, model.zero_grad(): 2.0 4.0
SEEN
