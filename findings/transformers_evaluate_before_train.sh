#!/usr/bin/env bash
# transformers 5.24.0 with accelerate 1.15.0 and torch 2.13.0: after `Trainer.evaluate()`, the first
# `Trainer.train()` of a torchrun job wraps nothing in DistributedDataParallel. Each rank trains
# alone: no warning, no error, and the ranks' weights differ.
#
# Expected: the same as without evaluate(), a DistributedDataParallel and equal weights.
# Seen (2026-11-27): `evaluate` prepares the bare model, which accelerate then takes for prepared.
#     train: DistributedDataParallel, equal weights: True
#     evaluate, train: GPT2LMHeadModel, equal weights: False
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy
cat > program.py <<'PYTHON'
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=21, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
)
model = GPT2LMHeadModel(config)
rows = [torch.arange(k % 16, k % 16 + 5) for k in range(32)]
data = [{"input_ids": row, "labels": row} for row in rows]
with tempfile.TemporaryDirectory() as output:
    settings = TrainingArguments(
        output, num_train_epochs=1, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
        ddp_backend="gloo", save_strategy="no", report_to=[], disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data)
    if "evaluate" in sys.argv[1]:
        trainer.evaluate()
    trainer.train()
    mine = model.lm_head.weight.detach()
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    equal = all(torch.equal(mine, one) for one in all_ranks)
    if dist.get_rank() == 0:
        print(f"{sys.argv[1]}: {type(trainer.model_wrapped).__name__}, equal weights: {equal}")
dist.destroy_process_group()
PYTHON
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
for way in "train" "evaluate, train"; do
  environment/bin/torchrun --standalone --nproc-per-node 2 program.py "$way" 2> log | grep "equal weights" | tee -a found || { cat log; exit 1; }
done
diff found - << 'SEEN'
train: DistributedDataParallel, equal weights: True
evaluate, train: GPT2LMHeadModel, equal weights: False
SEEN
