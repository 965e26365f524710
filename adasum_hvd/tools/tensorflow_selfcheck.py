"""`adasum_hvd.tools.selfcheck` with TensorFlow's tensors."""

from __future__ import annotations

import tensorflow as tf

import adasum_hvd.tensorflow as hvd
from adasum_hvd.tensorflow.ops import LIBRARY
from adasum_hvd.tools.selfcheck import Array

__all__ = ["LIBRARY", "hvd", "reduce"]


def reduce(name: str, array: Array) -> Array:
    """Return the AdaSum of every rank's array. Collective; blocks."""
    return hvd.allreduce(tf.constant(array), op=hvd.Adasum, name=name).numpy()
