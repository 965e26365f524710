"""`tf.compat.v1.train` optimizers, in a graph and session or eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from adasum_hvd.marks import is_marked_local
from adasum_hvd.options import Options
from adasum_hvd.tensorflow.delta import bounded, wide
from adasum_hvd.tensorflow.reduction import (
    Reduction,
    must_reduce,
)
from adasum_hvd.tensorflow.tape import prepared

_classes: dict[tuple[type, type], type] = {}


class _Legacy(tf.compat.v1.train.Optimizer):
    """Mixed in front of the user's optimizer class."""

    _adasum_options: Options
    _adasum_reduction: Reduction

    def _chosen(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return the pairs that a reduction is for; RuntimeError where no rank has any."""
        chosen = [
            (gradient, variable)
            for gradient, variable in pairs
            if gradient is not None and not is_marked_local(variable)
        ]
        if not chosen:
            self._adasum_reduction.agree((), ())  # the others hear of it here
            raise RuntimeError(
                "DistributedOptimizer: required gradients to reduce over "
                f"{self._adasum_options.process_set.size()} ranks, got none; the replicas "
                "would drift apart"
            )
        return chosen

    def _reduce(self, tensors: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self._adasum_reduction(tensors, variables)


class _LegacyGradient(_Legacy):
    """The gradient variant: `compute_gradients` returns reduced gradients."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As TensorFlow's, reduced over the ranks. Collective where it runs."""
        pairs = super().compute_gradients(*args, **kwargs)
        chosen = self._chosen(pairs)
        gradients, variables = zip(*chosen, strict=True)
        ready = prepared(gradients, variables, self._adasum_options)
        reduced = self._reduce(ready, variables)
        by_variable = dict(zip(map(id, variables), reduced, strict=True))
        return [(by_variable.get(id(v), gradient), v) for gradient, v in pairs]


class _LegacyDelta(_Legacy):
    """The delta variant: `apply_gradients` takes the local step and reduces the changes."""

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """As TensorFlow's. Collective where it runs."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in self._chosen(pairs)]
        # A reference variable's value is its memory, which the step is about to change.
        starts = [tf.raw_ops.DeepCopy(x=wide(variable)) for variable in variables]
        with tf.control_dependencies(starts):
            step = super().apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([] if step is None else [step]):
            changes = [
                wide(variable.read_value()) - start
                for variable, start in zip(variables, starts, strict=True)
            ]
        limit = self._adasum_options.clip_delta_norm
        reduced = bounded(self._reduce(changes, variables), limit)
        return tf.group(
            *(
                variable.assign(tf.cast(start + change, variable.dtype.base_dtype))
                for variable, start, change in zip(
                    variables, starts, reduced, strict=True
                )
            )
        )


def wrap(optimizer: tf.compat.v1.train.Optimizer, options: Options) -> Any:
    """Return `optimizer`'s slots and settings in an instance of the variant of the op.

    Raises:
        NotImplementedError: accumulation or local steps, which the Keras optimizers have.
    """
    for name in ("backward_passes_per_step", "local_steps"):
        if getattr(options, name) != 1:
            raise NotImplementedError(
                f"{name}: required 1 with a tf.compat.v1 optimizer, got "
                f"{getattr(options, name)}; use a Keras optimizer"
            )
    if not must_reduce(options):
        return optimizer
    mixin = _LegacyDelta if options.is_delta else _LegacyGradient
    base = type(optimizer)
    if (mixin, base) not in _classes:
        name = f"Distributed{base.__name__}"
        _classes[mixin, base] = type(name, (mixin, base), {"__doc__": base.__doc__})
    distributed: Any = object.__new__(_classes[mixin, base])
    distributed.__dict__.update(optimizer.__dict__)
    distributed._adasum_options = options
    distributed._adasum_reduction = Reduction("DistributedOptimizer", options)
    return distributed
