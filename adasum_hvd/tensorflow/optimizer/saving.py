"""A distributed optimizer in a saved Keras model."""

from __future__ import annotations

from typing import Any

import keras
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression

from adasum_hvd.common import ops
from adasum_hvd.common.options import SHARED, Options

CLASS_NAME = "DistributedOptimizer"
_KEPT = ("sparse_as_dense", *SHARED)


def saved_config(plain: Any, options: Options) -> dict[str, Any]:
    """Return what a saved model keeps of a distributed optimizer.

    Args:
        plain: the optimizer without the distribution, which is saved inside.
        options: the distribution; of a process set only whether it was the global one.
    """
    return {
        "optimizer": keras.saving.serialize_keras_object(plain),
        "op": options.op.name,
        "compression": "fp16" if options.compression is Compression.fp16 else "none",
        "all_ranks": options.process_set.process_set_id == 0,
        **{name: getattr(options, name) for name in _KEPT},
    }


def restored_options(config: dict[str, Any]) -> Options:
    """Return the options that :func:`saved_config` kept; older files have fewer."""
    return Options(
        op=ops.ReduceOp[config["op"]],
        process_set=mpi_ops.global_process_set,
        compression=getattr(Compression, config["compression"]),
        **{name: config[name] for name in _KEPT if name in config},
    )
