#!/usr/bin/env bash
# sentence-transformers 6.2.0 with transformers 5.24.0 and torch 2.13.0: under torchrun,
# `SentenceTransformerTrainer` wraps the model in DistributedDataParallel, but not the loss, whose
# parameters its optimizer trains, too. With `SoftmaxLoss` each rank trains a classifier of its own,
# from other first weights unless the ranks have one seed: no warning, no error.
#
# Expected: equal parameters on all ranks.
# Seen (2026-11-29), two ranks with one seed and two halves of the data:
#     classifier.weight: equal False
#     classifier.bias: equal False
#     model.module.0.embedding.weight: equal True
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
  sentence-transformers==6.2.0 datasets numpy
cat > program.py <<'PYTHON'
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import SoftmaxLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

torch.manual_seed(0)
words = {"[UNK]": 0, **{f"w{i}": i + 1 for i in range(9)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=4)], device="cpu")
loss = SoftmaxLoss(model, 4, 3)
rows = [{"a": f"w{i % 9}", "b": f"w{i % 7} w{i % 4}", "label": i % 3} for i in range(32)]
with tempfile.TemporaryDirectory() as output:
    settings = SentenceTransformerTrainingArguments(
        output, num_train_epochs=1, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
        ddp_backend="gloo", save_strategy="no", report_to=[], disable_tqdm=True,
    )
    data = Dataset.from_list(rows)
    SentenceTransformerTrainer(model, settings, train_dataset=data, loss=loss).train()
for name, parameter in loss.named_parameters():
    mine = parameter.detach()
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    equal = all(torch.equal(mine, one) for one in every)
    if dist.get_rank() == 0:
        print(f"{name}: equal {equal}")
dist.destroy_process_group()
PYTHON
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
environment/bin/torchrun --standalone --nproc-per-node 2 program.py > out 2> log || { cat log; exit 1; }
grep ": equal" out | sort > found
cat found
diff found - << 'SEEN'
classifier.bias: equal False
classifier.weight: equal False
model.module.0.embedding.weight: equal True
SEEN
