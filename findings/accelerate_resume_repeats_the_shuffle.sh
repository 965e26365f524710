#!/usr/bin/env bash
# accelerate 1.15.0 with torch 2.13.0: `save_state` and `load_state` forget which epoch the data
# are in. With `use_seedable_sampler=True`, which is there so that the order of the data can be
# repeated, a job that was saved after epoch 1 goes on with the orders of epochs 0 and 1. Known:
# https://github.com/huggingface/accelerate/issues/3996
#
# Expected: the resumed job draws the orders that the uninterrupted one does.
# Seen (2026-11-28): no warning.
#     epochs 0 and 1 are drawn again: True
#     epochs 2 and 3 of the uninterrupted job: False
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 accelerate==1.15.0 numpy
cat > program.py <<'PYTHON'
import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

set_seed(3)
accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
model = torch.nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    torch.utils.data.DataLoader(list(range(16)), batch_size=2, shuffle=True),
)
resumed = sys.argv[1] == "resume"
if resumed:
    accelerator.load_state("saved")
for epoch in range(2 if resumed else 0, 4):
    if epoch == 2 and not resumed:
        accelerator.save_state("saved")
    print(json.dumps([batch.tolist() for batch in loader]))
PYTHON
for way in "start" "resume"; do
  environment/bin/python program.py "$way" 2> log > "$way" || { cat log; exit 1; }
done
again() { cmp --silent <(sed -n "$1" start) resume && echo True || echo False; }
{
  echo "epochs 0 and 1 are drawn again: $(again 1,2p)"
  echo "epochs 2 and 3 of the uninterrupted job: $(again 3,4p)"
} | tee found
diff found - << 'SEEN'
epochs 0 and 1 are drawn again: True
epochs 2 and 3 of the uninterrupted job: False
SEEN
