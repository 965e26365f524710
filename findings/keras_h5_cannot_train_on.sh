#!/usr/bin/env bash
# Keras 3.15.1 and 3.12.4 with TensorFlow 2.21.0: a compiled model that was saved as `.h5` after
# `fit`, and loaded by `load_model`, cannot train on: the first step of the loaded model raises. The
# loaded optimizer was built for other variables than those of the loaded model. 3.12.4 fails on the
# way to that message. A model saved as `.keras` by the same program trains on.
#
# Expected: `fit` goes on, as after `.keras`; `load_model` gives no error and no warning of this.
# Seen (2026-11-28):
#     3.15.1 .keras: trains on
#     3.15.1 .h5: ValueError, Unknown variable
#     3.12.4 .keras: trains on
#     3.12.4 .h5: NotImplementedError, numpy() is only
#
# Fails if this behaviour changes. Needs Python 3.11 to 3.13 and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet tensorflow-cpu==2.21.0 keras==3.15.1
environment/bin/pip install --quiet --no-deps --target older keras==3.12.4
cat > program.py <<'PYTHON'
import sys

import keras
import numpy as np

for ending in (".keras", ".h5"):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(), keras.losses.MeanSquaredError())
    data = np.ones((2, 2)), np.ones((2, 1))
    model.fit(*data, verbose=0)
    model.save(f"model{ending}")
    loaded = keras.models.load_model(f"model{ending}")
    became = "trains on"
    try:
        loaded.fit(*data, verbose=0)
    except Exception as error:
        known = ("Unknown variable", "numpy() is only")
        start = next(words for words in known if words in str(error))
        became = f"{type(error).__name__}, {start}"
    print(f"{keras.__version__} {ending}: {became}")
PYTHON
export KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3
for first in "" older; do
  PYTHONPATH=$first environment/bin/python program.py 2> log >> found || { cat log; exit 1; }
done
cat found
diff found - << 'SEEN'
3.15.1 .keras: trains on
3.15.1 .h5: ValueError, Unknown variable
3.12.4 .keras: trains on
3.12.4 .h5: NotImplementedError, numpy() is only
SEEN
