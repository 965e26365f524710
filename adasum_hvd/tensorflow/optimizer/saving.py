"""A distributed optimizer in a saved Keras model."""

from __future__ import annotations

from typing import Any

import keras
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression

from adasum_hvd.base import ops
from adasum_hvd.base.options import SHARED, Options

CLASS_NAME = "DistributedOptimizer"
_KEPT = ("sparse_as_dense", *SHARED)


def saved_config(plain: Any, options: Options) -> dict[str, Any]:
    """Return a distributed optimizer's configuration; of a process set, whether it was global."""
    return {
        "optimizer": keras.saving.serialize_keras_object(plain),
        "op": options.op.name,
        "compression": "fp16" if options.compression is Compression.fp16 else "none",
        "all_ranks": options.process_set.process_set_id == 0,
        **{name: getattr(options, name) for name in _KEPT},
    }


def restored_options(config: dict[str, Any]) -> Options:
    """Return the options from :func:`saved_config`; older files have fewer."""
    return Options(
        op=ops.ReduceOp[config["op"]],
        process_set=mpi_ops.global_process_set,
        compression=getattr(Compression, config["compression"]),
        **{name: config[name] for name in _KEPT if name in config},
    )
