"""Comparison of the ranks' models, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from horovod.tensorflow import mpi_ops

from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.base.replicas import ReplicaMismatch as ReplicaMismatch
from adasum_hvd.base.replicas import compare, digest_of, is_due
from adasum_hvd.tensorflow.broadcasting import allgather_object
from adasum_hvd.tensorflow.optimizer import is_distributed
from adasum_hvd.tensorflow.optimizer.slots import inner, local_slots, variables_of


def digest(variable: Any) -> str:
    """Return a hash of a variable's dtype, shape and bits."""
    array = np.asarray(variable)
    return digest_of(array.dtype, array.shape, array.tobytes())


def _state(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizer's variables that all ranks share."""
    plain = inner(optimizer)
    if optimizer is None or (is_distributed(plain) and plain._adasum.options.is_delta):
        return  # the delta variant's optimizer state is local by design
    local = local_slots(optimizer)
    yield from (v for v in variables_of(optimizer) if id(v) not in local)


def check_replicas(
    model: Any,
    optimizer: Any = None,
    every: int = 1,
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> bool:
    """Compare weights and optimizer state over the ranks, bit for bit. Not in `tf.function`.

    Average the statistics of batch normalization before, or mark them with `mark_worker_local`.

    Args:
        model: a Keras model or layer, or any `tf.Module`, without its worker-local variables.
        optimizer: its variables are compared, too, except for the delta variant's, which differ.
        every: compare on every k-th call for this model; return whether this call did.
        process_set: the ranks to compare.

    Raises:
        ValueError: `every` is not an integer of at least 1.
        TypeError: `model` has neither `weights` nor `variables`.
        ReplicaMismatch: on every rank; names the first variable that differs and the ranks.

    Collective: every rank of `process_set`; blocks when it compares.
    """
    weights = getattr(model, "weights", getattr(model, "variables", None))
    if weights is None:
        raise TypeError(
            f"check_replicas: expected a model, but got {type(model).__name__}; pass a Keras model "
            "or a tf.Module"
        )
    if not is_due(model, every):
        return False
    variables = [*weights, *_state(optimizer)]
    shared = [variable for variable in variables if not is_marked_local(variable)]
    mine = [(getattr(v, "path", v.name), digest(v)) for v in shared]
    by_rank = allgather_object(
        mine, name="adasum.check_replicas", process_set=process_set
    )
    # Keras numbers the names of models, so two ranks' names may differ.
    named = [
        [(mine[index][0] if index < len(mine) else name, bits)
         for index, (name, bits) in enumerate(digests)]
        for digests in by_rank
    ]  # fmt: skip
    compare(list(process_set.ranks), named, mpi_ops.rank())
    return True
