#!/usr/bin/env bash
# accelerate 1.15.0 with torch 2.13.0: `Accelerator.reduce(tensor, reduction="none")` sums over the
# ranks. Its documentation says of "none" that it "will not perform any operation". Any other word
# sums too: a slip such as "avg" is not refused. Known, open:
# https://github.com/huggingface/accelerate/pull/4282
#
# Expected: with "none" each rank keeps its number; "avg" is a mean or an error.
# Seen (2026-11-28), on ranks 0 and 1 of 2, which hold 1 and 2:
#     none: [3.0, 3.0]
#     mean: [1.5, 1.5]
#     avg: [3.0, 3.0]
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 accelerate==1.15.0 numpy
cat > program.py <<'PYTHON'
import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
mine = torch.tensor(1.0 + accelerator.process_index)
for reduction in ("none", "mean", "avg"):
    ranks = [None, None]
    dist.all_gather_object(ranks, accelerator.reduce(mine, reduction=reduction).item())
    if accelerator.is_main_process:
        print(f"{reduction}: {ranks}", flush=True)
accelerator.end_training()
PYTHON
OMP_NUM_THREADS=1 environment/bin/torchrun --standalone --nproc-per-node 2 program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
none: [3.0, 3.0]
mean: [1.5, 1.5]
avg: [3.0, 3.0]
SEEN
