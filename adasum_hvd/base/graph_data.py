"""The end of the data in a graph of TensorFlow's."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any


def after_data(gradients: Iterable[Any]) -> Any:
    """Return a context whose operations wait for all data of the gradients' functions.

    In a graph, `fit` learns by a step without data that its data has ended. No part of that step
    may run, and each rank would run other parts. Gradients may need no data: regularizers'.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        return nullcontext()
    refs = tf.resource, tf.variant  # variables' and iterators', always there
    found: Any = {getattr(gradient, "graph", None) for gradient in gradients}
    data = [
        operation
        for graph in found - {None}
        for operation in (graph.get_operations() if graph.building_function else ())
        if "GetNext" in operation.type
        or (operation.type == "Placeholder" and operation.outputs[0].dtype not in refs)
    ]
    with tf.control_dependencies(data):
        ready = tf.no_op()
    return tf.control_dependencies([ready])
