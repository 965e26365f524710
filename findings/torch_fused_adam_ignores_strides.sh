#!/usr/bin/env bash
# torch 2.13.0: on a CPU, Adam(fused=True) reads parameters, gradients and moments in the order of
# memory. A gradient whose strides are not the parameter's changes the wrong elements, silently.
# backward() gives gradients the parameter's strides, and torch.autograd.grad does not: a convolution
# of images in channels_last has weights' gradients in channels_last. On CUDA the same step raises
# "must have same dtype, device, and layout" (pytorch issue 106951).
#
# Expected: the update of Adam without fused, or an error.
# Seen (2026-11-29), elements whose update has the sign of minus the gradient's, of 108:
#     backward, fused=False: 108
#     backward, fused=True: 108
#     autograd.grad, fused=False: 108
#     autograd.grad, fused=True: 58
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

torch.manual_seed(0)
images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
start = torch.randn(4, 3, 3, 3)


def step(by_backward, fused):
    w = torch.nn.Parameter(start.clone())
    loss = torch.nn.functional.conv2d(images, w).square().mean()
    if by_backward:
        loss.backward()
    else:
        (w.grad,) = torch.autograd.grad(loss, [w])
    torch.optim.Adam([w], lr=0.1, fused=fused, foreach=False).step()
    right = ((w.detach() - start).sign() == -w.grad.sign()).sum().item()
    print(f"{'backward' if by_backward else 'autograd.grad'}, fused={fused}: {right}")


for by_backward in (True, False):
    for fused in (False, True):
        step(by_backward, fused)
PYTHON
environment/bin/python program.py 2> log | tee found
diff found - << 'SEEN' || { cat log; exit 1; }
backward, fused=False: 108
backward, fused=True: 108
autograd.grad, fused=False: 108
autograd.grad, fused=True: 58
SEEN
