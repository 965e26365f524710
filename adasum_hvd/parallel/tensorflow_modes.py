"""Detection of parallel modes from TensorFlow's and Keras's own objects.

As `torch_modes.py`, it imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from adasum_hvd.parallel.findings import ParallelModeFinding


def native(variable: Any) -> Any:
    """Return the TensorFlow variable that a Keras 3 variable keeps, and any other as it is."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def _strategies(variables: Iterable[Any]) -> list[Any]:
    """Return the strategy in scope and the strategies of the variables."""
    tensorflow = sys.modules["tensorflow"]
    found = [tensorflow.distribute.get_strategy()]
    for variable in variables:
        strategy = getattr(native(variable), "distribute_strategy", None)
        if strategy is not None:
            found.append(strategy)
    return found


def detect(variables: Iterable[Any] = ()) -> list[ParallelModeFinding]:
    """Return the parallel modes in force, at most one finding for each.

    Args:
        variables: TensorFlow or Keras 3 variables that are to be reduced.

    Detects `tf.distribute` strategies of several replicas, in scope or of a variable, and a
    `keras.distribution` over several devices.
    """
    findings = []
    strategies = _strategies(variables) if "tensorflow" in sys.modules else []
    replicated = [each for each in strategies if each.num_replicas_in_sync > 1]
    if replicated:
        name, replicas = (
            type(replicated[0]).__name__,
            replicated[0].num_replicas_in_sync,
        )
        text = f"{name} of {replicas} replicas"
        findings.append(ParallelModeFinding("tf_strategy", text))
    distribution = sys.modules.get("keras.distribution")
    current = distribution.distribution() if distribution else None
    if current is not None and current.device_mesh.devices.size > 1:
        name, devices = type(current).__name__, current.device_mesh.devices.size
        text = f"Keras {name} over {devices} devices"
        findings.append(ParallelModeFinding("keras_distribution", text))
    return findings
