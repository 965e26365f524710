#!/usr/bin/env bash
# Keras 3.15.1 with TensorFlow 2.21.0: if the length of the data is unknown (generators, TFRecords,
# `filter`), `fit` learns that the data has ended by a call of its function for one step. TensorFlow
# runs what needs no batch there: `iterations` counts one step more per epoch, and the weights decay
# once more. If the length is known, the same program is right.
#
# Expected: two batches are two steps; weights of 1 decay to 0.95 * 0.95 = 0.9025.
# Seen (2026-11-29):
#     length 2: 2 iterations, weight 0.9025
#     length unknown: 3 iterations, weight 0.8574
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
import tensorflow as tf

zeros = np.zeros((2, 3), np.float32)  # no gradient: the weights only decay
for length in ("2", "unknown"):
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((3,)), layer])
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    model.compile(optimizer, "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((zeros, zeros[:, :1]))
    if length == "unknown":
        data = data.filter(lambda *_: True)
    model.fit(data.batch(1), verbose=0)
    steps, weight = int(optimizer.iterations), float(layer.kernel[0, 0])
    print(f"length {length}: {steps} iterations, weight {weight:.4f}")
PYTHON
export KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3
environment/bin/python program.py 2> log > found || { cat log; exit 1; }
cat found
diff found - << 'SEEN'
length 2: 2 iterations, weight 0.9025
length unknown: 3 iterations, weight 0.8574
SEEN
