#!/usr/bin/env bash
# torch 2.13.0: if torch.futures.Future.wait() raises an error, the frames through which it goes, and
# all their local variables, stay for ever, also after `del future`. The future holds the exception,
# the exception its frames, and the frame of wait() the future, through which Python's collector does
# not see. A loop that survives failed collectives (asynchronous reductions) keeps a step's tensors
# for each of them. Forgetting the traceback helps.
#
# Expected: garbage that gc.collect() frees, as with concurrent.futures.
# Seen (2026-11-29), objects that live on after three failed steps:
#     concurrent.futures: 0
#     torch.futures: 3
#     torch.futures, and error.__traceback__ = None: 0
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PYTHON'
import concurrent.futures
import gc
import weakref

import torch


class Gradients:
    pass


def step(make):
    gradients = Gradients()
    made.append(weakref.ref(gradients))
    future = make()
    future.set_exception(RuntimeError("a rank has ended"))
    future.wait() if hasattr(future, "wait") else future.result()


for title, make, forgets in (
    ("concurrent.futures", concurrent.futures.Future, False),
    ("torch.futures", torch.futures.Future, False),
    ("torch.futures, and error.__traceback__ = None", torch.futures.Future, True),
):
    made = []
    for _ in range(3):
        try:
            step(make)
        except RuntimeError as error:
            if forgets:
                error.__traceback__ = None
    gc.collect()
    print(f"{title}: {sum(one() is not None for one in made)}")
PYTHON
environment/bin/python program.py 2> log | tee found
diff found - << 'SEEN' || { cat log; exit 1; }
concurrent.futures: 0
torch.futures: 3
torch.futures, and error.__traceback__ = None: 0
SEEN
