#!/usr/bin/env bash
# torch 2.13.0: DistributedDataParallel(static_graph=True) fails with an internal assertion, "please
# report a bug to PyTorch", if the first backward pass is inside no_sync(), as it is in every script
# that accumulates gradients. It does not matter how the passes of a step are accumulated later: one
# step without no_sync() before, and the same loop works.
#
# Expected: gradients are accumulated as with static_graph=False, or an error that names no_sync().
# Seen (2026-11-28), two passes a step, the first one in no_sync():
#     static_graph=False: gradient 2.0
#     static_graph=True, a step without no_sync() before: gradient 2.0
#     static_graph=True: expect_autograd_hooks_ INTERNAL ASSERT FAILED
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PYTHON'
import re
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)


def train(title, static_graph, plain_step_before):
    model = torch.nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(model, static_graph=static_graph)
    ones = torch.ones(1, 1)
    if plain_step_before:
        ddp(ones).sum().backward()
        model.zero_grad()
    try:
        with ddp.no_sync():
            ddp(ones).sum().backward()
        ddp(ones).sum().backward()
        print(f"{title}: gradient {model.weight.grad.item()}")
    except RuntimeError as error:
        print(f"{title}:", re.search(r"\w+ INTERNAL ASSERT FAILED", str(error))[0])


train("static_graph=False", False, False)
train("static_graph=True, a step without no_sync() before", True, True)
train("static_graph=True", True, False)
PYTHON
environment/bin/python program.py "$folder" 2> log | tee found
diff found - << 'SEEN' || { cat log; exit 1; }
static_graph=False: gradient 2.0
static_graph=True, a step without no_sync() before: gradient 2.0
static_graph=True: expect_autograd_hooks_ INTERNAL ASSERT FAILED
SEEN
