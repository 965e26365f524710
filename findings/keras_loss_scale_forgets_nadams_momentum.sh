#!/usr/bin/env bash
# Keras 3.15.1 with TensorFlow 2.21.0: inside a LossScaleOptimizer, which model.compile adds under
# mixed_float16, Nadam's product of momenta is no variable of the optimizer, and files do not have it.
# A model that is saved, loaded and trained on takes other steps, as if its momentum had just begun.
# Ranks that load a file, or get the variables of another rank, differ from those that trained on.
#
# Expected: 10 steps, a file and 10 more steps give the weights of 20 steps, as without a loss scale.
# Seen (2026-11-29), and the largest difference of a weight:
#     Nadam: equal
#     LossScaleOptimizer(Adam): equal
#     LossScaleOptimizer(Nadam): 0.09
#
# Fails if this behaviour changes. Needs Python 3.11 to 3.13 and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet tensorflow-cpu==2.21.0 keras==3.15.1
cat > program.py <<'PYTHON'
import keras
import numpy as np

x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
y = x.sum(1, keepdims=True) ** 3


def model_of(optimizer):
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def train(model):
    for _ in range(10):
        model.train_on_batch(x, y)


def scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer)


adam, nadam = keras.optimizers.Adam, keras.optimizers.Nadam
for title, make in (
    ("Nadam", lambda: nadam(0.05)),
    ("LossScaleOptimizer(Adam)", lambda: scaled(adam(0.05))),
    ("LossScaleOptimizer(Nadam)", lambda: scaled(nadam(0.05))),
):
    whole = model_of(make())
    train(whole)
    whole.save("half.keras")
    half = keras.models.load_model("half.keras")
    train(whole)
    train(half)
    pairs = zip(whole.get_weights(), half.get_weights())
    difference = max(np.abs(one - two).max() for one, two in pairs)
    print(f"{title}: {f'{difference:.2f}' if difference else 'equal'}")
PYTHON
export KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3
environment/bin/python program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
Nadam: equal
LossScaleOptimizer(Adam): equal
LossScaleOptimizer(Nadam): 0.09
SEEN
