"""`DistributedOptimizer`: AdaSum, Average or Sum around a Keras 3 optimizer.

`gradient.py` reduces gradients, then every rank takes the same step; `delta.py` lets every rank
take its own step and reduces the weight changes (arXiv 2006.02924, section 3; docs/tensorflow.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression

from adasum_hvd import parallel
from adasum_hvd.advice.banner import banner as banner_of
from adasum_hvd.advice.learning_rate import find_study
from adasum_hvd.base import ops
from adasum_hvd.base.agreement import refuse_process_set
from adasum_hvd.base.dynamic_subclass import as_dynamic_subclass
from adasum_hvd.base.options import Options, ProcessSet, check, groups_of, optimizer_op
from adasum_hvd.horovod import binding
from adasum_hvd.parallel.tensorflow_modes import detect
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.horovod_arguments import warn_without_effect
from adasum_hvd.tensorflow.optimizer.base import MULTI, KerasDistributed, State
from adasum_hvd.tensorflow.optimizer.delta import DeltaOptimizer, refuse_records
from adasum_hvd.tensorflow.optimizer.gradient import GradientOptimizer
from adasum_hvd.tensorflow.optimizer.loss_scale import DistributedLossScale
from adasum_hvd.tensorflow.optimizer.saving import CLASS_NAME, restored_options


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ops.ReduceOp | int | str = ops.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
    scale_local_gradients: bool = False,
    *,
    local_steps: int = 1,
    clip_delta_norm: float | None = None,
    bucket_bytes: int = Options.bucket_bytes,
    allow_modes: Collection[str] = (),
) -> Any:
    """Return `optimizer` as an instance of a subclass that reduces over the ranks.

    Args:
        optimizer: any Keras 3 optimizer, also `LossScaleOptimizer`. The result shares its
            variables, so use only the result.
        name: without effect, for Horovod's scripts, like `use_locking`, `device_dense`,
            `device_sparse` and `scale_local_gradients`: setting one warns with the reason.
        compression: `Compression.none`, or `Compression.fp16` for float16 on the wire.
        sparse_as_dense: reduce `tf.IndexedSlices` (embeddings) densely; otherwise `Average`
            and `Sum` gather the rows of all ranks, and other ops raise an error. The delta variant
            does not need it, because its sparse gradients stay local.
        op: a reduction or its name; `Adasum` and `AdasumDelta` are the delta variant.
        average_aggregated_gradients: divide the sums of `backward_passes_per_step` gradients
            by their number; not with AdaSum.
        groups: a number of buckets, or lists of variables that share one.
        process_set: as torch's, like all others: docs/arguments.md.

    Returns:
        An instance of a subclass of `type(optimizer)`.

    Raises:
        TypeError: not an optimizer.
        ValueError: bad arguments; a process set that is not registered. In a step: a sparse
            gradient for AdaSum of gradients without `sparse_as_dense`; passes of a window over
            different variables; the ranks' variables, optimizers or options differ.
        RuntimeError: inside a tf.distribute strategy or a keras.distribution. In a step: there is
            nothing to reduce; windows in an elastic job without a state that has the optimizer.
        NotImplementedError: a compression that is not a cast to float16; Keras on another
            backend than TensorFlow; in an elastic job a process set. In a step: under XLA.
    """
    warn_without_effect(
        "DistributedOptimizer",
        name=name,
        use_locking=use_locking,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local_gradients=scale_local_gradients,
    )
    options = Options(
        op=optimizer_op(op),
        process_set=process_set,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        local_steps=local_steps,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of("DistributedOptimizer", num_groups, groups),
        sparse_as_dense=sparse_as_dense,
        average_aggregated_gradients=average_aggregated_gradients,
        clip_delta_norm=clip_delta_norm,
        bucket_bytes=bucket_bytes,
    )
    check(options, (Compression.none, Compression.fp16))
    refuse_process_set(process_set, mpi_ops.global_process_set)
    # Every rank runs the same program and detects the same modes. Nothing is sent, because
    # models are also loaded on one rank alone.
    parallel.refuse([detect()] * mpi_ops.size(), allow_modes, mpi_ops.rank())
    if isinstance(optimizer, keras.optimizers.Optimizer):
        if keras.backend.backend() != "tensorflow":
            raise NotImplementedError(
                "DistributedOptimizer: expected Keras on TensorFlow, but got Keras on "
                f"{keras.backend.backend()}; set KERAS_BACKEND=tensorflow; on torch, train with "
                "DDP and adasum_hvd.distributed's hook"
            )
        return wrap(optimizer, options)
    raise TypeError(
        "DistributedOptimizer: expected a Keras 3 optimizer, but got "
        f"{type(optimizer).__module__}.{type(optimizer).__name__}; with an optimizer of "
        "tf.compat.v1.train, reduce the gradients by hvd.DistributedGradientTape"
    )


def banner(optimizer: Any) -> str:
    """Return one line with the settings in force: backend, ranks, groups, variant, wire.

    The optimizer's wire dtypes are known once it is built. TypeError if it is not distributed.
    """
    options = state_of("banner", optimizer).options
    dtypes = {variable.dtype for variable in optimizer._trainable_variables}
    wire = {tf_ops.wire_dtype(dtype, options.compression).name for dtype in dtypes}
    return banner_of(
        options,
        tf_ops.settings(),
        "MPI" if mpi_ops.mpi_enabled() else "Gloo",
        binding.transport_description(
            tf_ops.LIBRARY, options.process_set.process_set_id
        ),
        sorted(wire),
        optimizer.extra_bytes(),
        find_study(optimizer),
    )


def is_distributed(optimizer: Any) -> bool:
    """Return whether `optimizer` came from `DistributedOptimizer`."""
    return isinstance(optimizer, KerasDistributed | DistributedLossScale)


def state_of(caller: str, optimizer: Any) -> State:
    """Return a distributed optimizer's own state; raise TypeError for another optimizer."""
    if not is_distributed(optimizer):
        raise TypeError(
            f"{caller}: expected an optimizer from DistributedOptimizer, but got "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    state: State = optimizer._adasum
    return state


def wrap(optimizer: Any, options: Options) -> Any:
    """Return `optimizer`'s variables and settings in an instance of the op's variant."""
    if is_distributed(optimizer):
        raise ValueError(
            "DistributedOptimizer: expected a plain optimizer, but got one that is distributed "
            "already"
        )
    if isinstance(optimizer, MULTI):
        raise NotImplementedError(
            "DistributedOptimizer: expected an optimizer that takes the step, but got Keras's "
            "MultiOptimizer, whose inner optimizers take it; reduce the gradients with "
            "DistributedGradientTape and pass them to the plain MultiOptimizer"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scaled = _taken_over(optimizer, DistributedLossScale)
        scaled.inner_optimizer = wrap(optimizer.inner_optimizer, options)
        scaled.inner_optimizer._adasum.watch_overflow()
        optimizer.apply = _refuse_step
        return scaled
    refuse_records(type(optimizer), options)
    if options.local_steps > 1 and optimizer.use_ema:
        raise ValueError(
            "use_ema: expected local_steps=1, but got more; the moving average would be of "
            "weights that differ between the ranks"
        )
    variant = DeltaOptimizer if options.is_delta else GradientOptimizer
    distributed = _taken_over(optimizer, variant)
    distributed._configure(options)
    optimizer.apply = _refuse_step
    return distributed


def _taken_over(optimizer: Any, mixin: type) -> Any:
    from_config = staticmethod(SavedOptimizer.from_config)
    taken = as_dynamic_subclass(optimizer, mixin, CLASS_NAME, from_config=from_config)
    if vars(taken).get("apply") is _refuse_step:  # wrapped a second time
        del taken.apply
    return taken


def _refuse_step(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "DistributedOptimizer: expected steps of the optimizer that it returned, but got one of "
        "the optimizer that was passed to it, which reduces nothing (rank "
        f"{mpi_ops.rank()} of {mpi_ops.size()}); use the returned one, or a copy of this one alone"
    )


class SavedOptimizer:
    """The class that Keras finds for a distributed optimizer in a saved model."""

    @staticmethod
    def from_config(config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return the distributed optimizer of a saved configuration, or a plain one, and warn."""
        plain = keras.saving.deserialize_keras_object(
            config["optimizer"], custom_objects=custom_objects
        )
        if not mpi_ops.is_initialized() or not config["all_ranks"]:
            warnings.warn(
                f"{type(plain).__name__}: Horovod is not initialized or the process set was not "
                "the global one, so a plain optimizer was loaded, which reduces nothing; wrap "
                "it again",
                stacklevel=2,
            )
            return plain
        return wrap(plain, restored_options(config))


keras.saving.get_custom_objects()[CLASS_NAME] = SavedOptimizer
