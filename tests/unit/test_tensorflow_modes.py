"""Detection of TensorFlow's and Keras's strategies, each in a separate process."""

from __future__ import annotations

import subprocess
import sys

from tests.parallel.harness.imported import run_script

PROLOGUE = """
import tensorflow as tf
from adasum_hvd.parallel.tensorflow_modes import detect
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
"""


def test_nothing_loaded():
    script = """
import sys
from adasum_hvd.parallel.tensorflow_modes import detect
assert detect() == []
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_strategies():
    run_script(
        PROLOGUE
        + """
assert detect([tf.Variable(1.0), keras.Variable(1.0)]) == []
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    (finding,) = detect()
    mirrored, in_keras = tf.Variable(1.0), keras.Variable(1.0)
assert finding.mode == "tf_strategy" and "MirroredStrategy of 2" in finding.found, finding
for variable in (mirrored, in_keras):
    assert [f.mode for f in detect([variable])] == ["tf_strategy"], variable
one = tf.distribute.MirroredStrategy(["CPU:0"])
with one.scope():
    assert detect([tf.Variable(1.0)]) == []
"""
    )


def test_keras_distribution():
    run_script(
        PROLOGUE
        + """
mesh = keras.distribution.DeviceMesh((2,), ["batch"], ["cpu:0", "cpu:1"])
layout = keras.distribution.LayoutMap(mesh)
distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
keras.distribution.set_distribution(distribution)
(finding,) = detect()
assert finding.mode == "keras_distribution", finding
assert "ModelParallel over 2 devices" in finding.found, finding
keras.distribution.set_distribution(None)
assert detect() == []
"""
    )


def test_tf1_behaviour():
    """With TF1's behaviour, including shapes whose dimensions are not hashable."""
    run_script("""
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
import adasum_hvd.tensorflow as hvd
hvd.init()
variable = tf.get_variable("v", initializer=np.ones(3, np.float32), use_resource=True)
reduced = hvd.allreduce(2 * variable, op=hvd.Adasum)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    found = [session.run(reduced).tolist() for _ in range(2)]
assert found == [[2.0, 2.0, 2.0]] * 2, found
""")
