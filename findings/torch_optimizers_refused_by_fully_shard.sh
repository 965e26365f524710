#!/usr/bin/env bash
# torch 2.13.0: four ways of torch's own optimizers end in the first step over a model under
# `fully_shard`, where the documentation names no limit. Adafactor and Rprop write in place what
# DTensor cannot, fused SGD has no rule for shards (fused Adam has), and LBFGS flattens, which needs
# every row count to be a multiple of the ranks. All the others step.
#
# Expected: a step, equal to the one without shards, or a refusal by `fully_shard`'s documentation.
# Seen (2026-11-28), on 2 ranks, for a layer of 3 rows:
#     steps: ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD, Adam fused
#     RuntimeError: Adafactor, LBFGS, Rprop
#     NotImplementedError: SGD fused
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

NAMES = (
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS NAdam RAdam RMSprop Rprop SGD".split()
)
WAYS = [(name, {}) for name in NAMES] + [("Adam", {"fused": True}), ("SGD", {"fused": True})]
mesh = init_device_mesh("cpu", (2,))
found = {"steps": [], "RuntimeError": [], "NotImplementedError": []}
for name, options in WAYS:
    model = torch.nn.Linear(4, 3)
    fully_shard(model, mesh=mesh)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
        result = "steps"
    except RuntimeError as error:
        result = type(error).__name__
    found[result].append(" ".join([name, *options]))
if dist.get_rank() == 0:
    for result, names in found.items():
        print(f"{result}: {', '.join(names)}")
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 environment/bin/torchrun --standalone --nproc-per-node 2 program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
steps: ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD, Adam fused
RuntimeError: Adafactor, LBFGS, Rprop
NotImplementedError: SGD fused
SEEN
