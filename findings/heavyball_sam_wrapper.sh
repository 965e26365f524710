#!/usr/bin/env bash
# heavyball 3.2.1 with torch 2.13.0: `SAMWrapper` trains, but two things that a torch optimizer
# takes are refused, with its own default AdamW inside. `train()` and `eval()`, which it defines,
# call methods that only the schedule-free optimizers have. A learning rate scheduler finds no rate
# in its groups; one over `wrapped_optimizer` is taken.
#
# Expected: nothing to do in train() and eval(), and a scheduler that changes the rate.
# Seen (2026-11-28):
#     steps: yes
#     train: AttributeError: 'AdamW' object has no attribute 'train'
#     eval: AttributeError: 'AdamW' object has no attribute 'train'
#     scheduler: KeyError: 'lr'
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 heavyball==3.2.1 numpy setuptools
cat > program.py <<'PYTHON'
import torch
from heavyball import SAMWrapper
from torch.optim.lr_scheduler import StepLR

torch.compiler.set_stance("force_eager")
model = torch.nn.Linear(3, 1)
optimizer = SAMWrapper(model.parameters())


def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    return loss


before = model.weight.detach().clone()
optimizer.step(closure)
print("steps:", "no" if torch.equal(before, model.weight) else "yes")
for name, call in (
    ("train", optimizer.train),
    ("eval", optimizer.eval),
    ("scheduler", lambda: StepLR(optimizer, 1)),
):
    try:
        call()
        print(f"{name}: taken")
    except (AttributeError, KeyError) as error:
        print(f"{name}: {type(error).__name__}: {error}")
PYTHON
environment/bin/python program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
steps: yes
train: AttributeError: 'AdamW' object has no attribute 'train'
eval: AttributeError: 'AdamW' object has no attribute 'train'
scheduler: KeyError: 'lr'
SEEN
