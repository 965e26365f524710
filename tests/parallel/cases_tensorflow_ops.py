"""Horovod's own TensorFlow functions reach the op, and get the bits that torch gets."""

from __future__ import annotations

import ctypes
import hashlib

import horovod.tensorflow as hvd
import numpy as np
from horovod.tensorflow import mpi_ops

from adasum_hvd import binding, reference

SIZES = (1, 7, 4096, 300, 4097, 100_003, 8)


def start() -> None:
    hvd.init()


def align() -> None:
    hvd.broadcast_object(None, root_rank=0)


def library() -> ctypes.CDLL:
    return mpi_ops._basics.MPI_LIB_CTYPES


def array_of(rank: int, size: int, dtype: type) -> np.ndarray:
    return np.random.default_rng([0, rank, size]).standard_normal(size).astype(dtype)


def case_the_op_answers() -> None:
    binding.require_op(library())
    assert binding.settings(library())["op"] == "on"


def case_every_dtype_and_size() -> dict[str, str]:
    import tensorflow as tf

    digests = {}
    before = binding.counters(library()).calls
    for dtype in (np.float16, np.float32, np.float64):
        digest = hashlib.sha256()
        for size in SIZES:
            mine = tf.constant(array_of(hvd.rank(), size, dtype))
            result = hvd.allreduce(
                mine, op=hvd.Adasum, name=f"tf.{dtype.__name__}.{size}"
            ).numpy()
            wanted = reference.adasum(
                [array_of(r, size, dtype) for r in range(hvd.size())]
            )
            tolerance = {np.float16: 2**-10, np.float32: 1e-6, np.float64: 1e-9}[dtype]
            assert np.abs(result - wanted).max() <= tolerance * max(
                0.3, np.abs(wanted).max()
            )
            digest.update(result.tobytes())
        digests[dtype.__name__] = digest.hexdigest()
    assert binding.counters(library()).calls >= before + 3 * len(SIZES)
    return digests
