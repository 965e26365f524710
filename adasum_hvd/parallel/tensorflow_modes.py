"""Detection of parallel modes from TensorFlow's and Keras's own objects."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from adasum_hvd.parallel.findings import ParallelModeFinding


def native(variable: Any) -> Any:
    """Return the TensorFlow variable that a Keras 3 variable keeps, and any other as it is."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def detect(variables: Iterable[Any] = ()) -> list[ParallelModeFinding]:
    """Return the parallel modes in force, at most one finding for each: docs/parallel.md."""
    findings, strategies = [], []
    if tensorflow := sys.modules.get("tensorflow"):
        own = (getattr(native(v), "distribute_strategy", None) for v in variables)
        strategies = [tensorflow.distribute.get_strategy(), *own]
    replicated = [s for s in strategies if s and s.num_replicas_in_sync > 1]
    if replicated:
        first = replicated[0]
        text = f"{type(first).__name__} of {first.num_replicas_in_sync} replicas"
        findings.append(ParallelModeFinding("tf_strategy", text))
    distribution = sys.modules.get("keras.distribution")
    current = distribution.distribution() if distribution else None
    if current is not None and current.device_mesh.devices.size > 1:
        devices = current.device_mesh.devices.size
        text = f"Keras {type(current).__name__} over {devices} devices"
        findings.append(ParallelModeFinding("keras_distribution", text))
    return findings
