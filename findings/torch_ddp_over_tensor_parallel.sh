#!/usr/bin/env bash
# torch 2.13.0: `DistributedDataParallel(model, device_mesh=mesh["data"])` over a model that
# `parallelize_module` has split: after the first forward pass the model has no parameters.
# `parameters()` and `state_dict()` are empty, so a checkpoint has no weights, and
# `clip_grad_norm_(model.parameters(), ...)` clips nothing, with a warning. Nothing is raised, and
# the optimizer, which was made before, goes on training. `replicate` was seen to do it in torch 2.6:
# https://github.com/pytorch/pytorch/issues/152712
#
# Expected: four parameters at all times, in the state dict too, and a norm above 0.
# Seen (2026-11-28), the parameters, the entries of the state dict, and the norm of the gradients:
#     before the first pass: 4, 4
#     step 1: 0, 0, norm 0.0
#     step 2: 0, 0, norm 0.0
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
model = DistributedDataParallel(model, device_mesh=mesh["data"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def say(moment, *more):
    if dist.get_rank() == 0:
        counts = len(list(model.parameters())), len(model.state_dict())
        print(f"{moment}:", ", ".join(map(str, (*counts, *more))), flush=True)


say("before the first pass")
for step in (1, 2):
    model(torch.ones(2, 4)).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    say(f"step {step}", f"norm {norm.item()}")
dist.barrier()
del model, optimizer
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 environment/bin/torchrun --standalone --nproc-per-node 4 program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
before the first pass: 4, 4
step 1: 0, 0, norm 0.0
step 2: 0, 0, norm 0.0
SEEN
