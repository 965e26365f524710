"""Any Keras 3 optimizer as one that reduces over the ranks, and back from a saved model."""

from __future__ import annotations

import warnings
from typing import Any

import keras
from horovod.tensorflow import mpi_ops

from adasum_hvd.options import Options
from adasum_hvd.tensorflow.optimizer.base import KerasDistributed
from adasum_hvd.tensorflow.optimizer.delta import DeltaOptimizer
from adasum_hvd.tensorflow.optimizer.gradient import GradientOptimizer
from adasum_hvd.tensorflow.optimizer.loss_scale import DistributedLossScale
from adasum_hvd.tensorflow.optimizer.saving import CLASS_NAME, restored_options

_classes: dict[tuple[type, type], type] = {}


def is_distributed(optimizer: Any) -> bool:
    """Return whether `optimizer` came from `DistributedOptimizer`."""
    return isinstance(optimizer, KerasDistributed | DistributedLossScale)


def wrap(optimizer: Any, options: Options) -> Any:
    """Return `optimizer`'s variables and settings in an instance of the variant of the op.

    Raises:
        ValueError: it is distributed already, or its settings would part the replicas.
        NotImplementedError: a `MultiOptimizer`, which takes no step of its own.
    """
    if is_distributed(optimizer):
        raise ValueError(
            "DistributedOptimizer: required a plain optimizer, got one that is distributed "
            "already"
        )
    if type(optimizer).__name__ == "MultiOptimizer":  # not in every Keras 3
        raise NotImplementedError(
            "DistributedOptimizer: required an optimizer that takes the step, got Keras's "
            "MultiOptimizer, which lets others take it; reduce the gradients with "
            "DistributedGradientTape and give them to the plain MultiOptimizer"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scaled = _taken_over(optimizer, DistributedLossScale)
        scaled.inner_optimizer = wrap(optimizer.inner_optimizer, options)
        scaled.inner_optimizer._adasum.watch_overflow()
        return scaled
    if options.local_steps > 1 and optimizer.use_ema:
        raise ValueError(
            "use_ema: required local_steps=1, got more; the average would be of weights that "
            "differ between the ranks"
        )
    variant = DeltaOptimizer if options.is_delta else GradientOptimizer
    distributed = _taken_over(optimizer, variant)
    distributed._configure(options)
    return distributed


def _taken_over(optimizer: Any, mixin: type) -> Any:
    """Return the optimizer's attributes in an instance of a subclass of its class."""
    base = type(optimizer)
    if (mixin, base) not in _classes:
        attributes = {
            "__module__": __name__,
            "__doc__": base.__doc__,
            "_base": base,
            "from_config": staticmethod(SavedOptimizer.from_config),
        }
        _classes[mixin, base] = type(CLASS_NAME, (mixin, base), attributes)
    distributed: Any = object.__new__(_classes[mixin, base])
    distributed.__dict__.update(optimizer.__dict__)
    return distributed


class SavedOptimizer:
    """What Keras finds when a saved model names the class of a distributed optimizer."""

    @staticmethod
    def from_config(config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return the distributed optimizer that `get_config` described.

        Without an initialized Horovod, or when it was of some ranks only, a plain one with a
        warning: wrap it again.
        """
        plain = keras.saving.deserialize_keras_object(
            config["optimizer"], custom_objects=custom_objects
        )
        if not mpi_ops.is_initialized() or not config["all_ranks"]:
            warnings.warn(
                f"{type(plain).__name__}: Horovod is not initialized or the process set was not "
                "the global one, so what was loaded is a plain optimizer, which reduces "
                "nothing; wrap it again",
                stacklevel=2,
            )
            return plain
        return wrap(plain, restored_options(config))


keras.saving.get_custom_objects()[CLASS_NAME] = SavedOptimizer
