#!/usr/bin/env bash
# torch 2.13.0: `.item()`, `float()` and `bool()` of a number computed from sharded DTensors give
# each rank its own part, silently: "is a weight above 3" is true on one rank and false on another,
# and they take different branches. What `clip_grad_norm_` returns is whole, the norm of one gradient
# is not. `full_tensor()` first gives the right number. Known:
# https://github.com/pytorch/pytorch/issues/144054 (called intended) and /166638 (open)
#
# Expected: the number of the whole tensor, as for a plain tensor, or an error.
# Seen (2026-11-28), on ranks 0 and 1 of 2; the weights are 1, 2, 3 and 4, the gradients too:
#     clip_grad_norm_: 5.4772 is [5.4772, 5.4772]
#     norm of the gradient: 5.4772 is [2.2361, 5.0]
#     mean: 2.5 is [1.5, 3.5]
#     any above 3: True is [False, True]
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
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))
model = torch.nn.Linear(1, 4, bias=False)
with torch.no_grad():
    model.weight.copy_(torch.arange(1.0, 5.0).reshape(4, 1))
fully_shard(model, mesh=mesh)
model(torch.ones(1, 1)).square().sum().div(2).backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
weight = model.weight.detach()
for name, number in (
    ("clip_grad_norm_", norm),
    ("norm of the gradient", model.weight.grad.norm()),
    ("mean", weight.mean()),
    ("any above 3", (weight > 3).any()),
):
    ranks = [None, None]
    dist.all_gather_object(ranks, number.item())
    whole, *ranks = (
        one if isinstance(one, bool) else round(one, 4)
        for one in (number.full_tensor().item(), *ranks)
    )
    if dist.get_rank() == 0:
        print(f"{name}: {whole} is {ranks}", flush=True)
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 environment/bin/torchrun --standalone --nproc-per-node 2 program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
clip_grad_norm_: 5.4772 is [5.4772, 5.4772]
norm of the gradient: 5.4772 is [2.2361, 5.0]
mean: 2.5 is [1.5, 3.5]
any above 3: True is [False, True]
SEEN
