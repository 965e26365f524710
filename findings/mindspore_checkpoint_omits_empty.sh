#!/usr/bin/env bash
# MindSpore 2.10.0, CPU wheel: `save_checkpoint` leaves out parameters with no elements, silently.
# The checkpoint is not complete: the very network that wrote it misses a parameter when it is read,
# and a tool that compares names finds a difference. The "safetensors" format keeps them.
#
# Expected: every parameter of the network, shape (0, 3) too, in both formats.
# Seen (2026-11-28):
#     network: empty (0, 3), full (2, 3)
#     ckpt: full (2, 3)
#     safetensors: empty (0, 3), full (2, 3)
#     not loaded: empty
#
# Fails if this behaviour changes. Needs Python 3.11 and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3.11}" -m venv environment
environment/bin/pip install --quiet mindspore==2.10.0 numpy==1.26.4
cat > program.py <<'PYTHON'
import mindspore
import numpy


class Network(mindspore.nn.Cell):
    def __init__(self):
        super().__init__()
        for name, rows in (("empty", 0), ("full", 2)):
            value = mindspore.Tensor(numpy.ones((rows, 3), numpy.float32))
            setattr(self, name, mindspore.Parameter(value, name=name))


def say(title, parameters):
    print(f"{title}:", ", ".join(f"{name} {one.shape}" for name, one in sorted(parameters.items())))


network = Network()
say("network", network.parameters_dict())
for form in ("ckpt", "safetensors"):
    mindspore.save_checkpoint(network, f"saved.{form}", format=form)
    say(form, mindspore.load_checkpoint(f"saved.{form}", format=form))
missing, _ = mindspore.load_param_into_net(network, mindspore.load_checkpoint("saved.ckpt"))
print("not loaded:", ", ".join(missing))
PYTHON
environment/bin/python program.py 2> log | grep -v WARNING > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
network: empty (0, 3), full (2, 3)
ckpt: full (2, 3)
safetensors: empty (0, 3), full (2, 3)
not loaded: empty
SEEN
