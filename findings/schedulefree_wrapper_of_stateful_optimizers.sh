#!/usr/bin/env bash
# schedulefree 1.4.1 with torch 2.13.0: `ScheduleFreeWrapper` says that it wraps any optimizer. It
# keeps its average in the wrapped optimizer's state before the first step, and optimizers that
# fill an empty state then fill nothing: of twelve optimizers of torch, ten raise a KeyError in the
# first step, RMSprop of the class's own example among them. Seen with AdamW in 2024, not mended:
# https://github.com/kohya-ss/sd-scripts/pull/1605
#
# Expected: three steps.
# Seen (2026-11-28):
#     steps: Adagrad, SGD
#     KeyError: ASGD, Adadelta, Adafactor, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 schedulefree==1.4.1 numpy
cat > program.py <<'PYTHON'
import torch
from schedulefree import ScheduleFreeWrapper

names = (
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)
found = {"steps": [], "KeyError": []}
for name in names:
    model = torch.nn.Linear(3, 1)
    base = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    optimizer = ScheduleFreeWrapper(base)
    optimizer.train()
    try:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found["steps"].append(name)
    except KeyError:
        found["KeyError"].append(name)
for result, optimizers in found.items():
    print(f"{result}: {', '.join(optimizers)}")
PYTHON
environment/bin/python program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
steps: Adagrad, SGD
KeyError: ASGD, Adadelta, Adafactor, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop
SEEN
