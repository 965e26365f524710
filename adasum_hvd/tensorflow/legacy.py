"""`tf.compat.v1.train` optimizers, in a graph and session or eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from adasum_hvd.common.agreement import optimizer_facts, refuse_elastic
from adasum_hvd.common.dynamic_subclass import as_dynamic_subclass
from adasum_hvd.common.marks import is_marked_local
from adasum_hvd.common.options import Options
from adasum_hvd.tensorflow.reduction import Reduction, must_reduce
from adasum_hvd.tensorflow.reduction.buckets import prepared
from adasum_hvd.tensorflow.reduction.changes import reduce_changes, refuse_records, wide

Pair = tuple[Any, Any]  # a gradient, or None, and its variable


class _Sums:
    """Sums of gradients over the passes of a window, in separate variables.

    The first pass of a window overwrites them. Clearing them instead could come before a late read.
    """

    def __init__(self, passes: int, average: bool):
        self.passes, self._divisor = passes, passes if average else 1
        self._count: tf.Variable | None = None
        self._sums: dict[int, tf.Variable] = {}  # by variable

    def add(self, pairs: Sequence[Pair]) -> tuple[list[Pair], tf.Tensor]:
        """Return the pairs with sums of gradients, and whether this pass is the window's last.

        Raises:
            NotImplementedError: a reference variable, which a branch of a graph cannot change.
        """
        self._create_sums(pairs)
        assert self._count is not None
        count = tf.identity(self._count.assign_add(1))
        first = tf.equal(count % self.passes, 1)
        totals = []
        for gradient, variable in pairs:
            if gradient is not None:
                gradient, kept = (
                    tf.convert_to_tensor(gradient),
                    self._sums[id(variable)],
                )
                total = kept.assign(tf.where(first, gradient, kept + gradient))
                gradient = tf.identity(total) / self._divisor
            totals.append((gradient, variable))
        return totals, tf.equal(count % self.passes, 0)

    @property
    def bytes(self) -> int:
        """The memory of the sums."""
        sums = self._sums.values()
        return sum(total.shape.num_elements() * total.dtype.size for total in sums)

    def _create_sums(self, pairs: Sequence[Pair]) -> None:
        with tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
            for gradient, variable in pairs:
                if not hasattr(variable, "handle"):
                    raise NotImplementedError(
                        "backward_passes_per_step: expected resource variables, but got the "
                        f"reference variable {variable.name}; pass use_resource=True"
                    )
                if gradient is not None and id(variable) not in self._sums:
                    zeros = tf.zeros(variable.shape, variable.dtype.base_dtype)
                    self._sums[id(variable)] = tf.Variable(zeros, trainable=False)


class _Legacy(tf.compat.v1.train.Optimizer):
    """A mixin before the user's optimizer class."""

    _adasum_options: Options
    _adasum_reduction: Reduction
    _adasum_sums: _Sums
    _adasum_dtypes: set[tf.DType]  # of reduced variables

    def extra_bytes(self) -> dict[str, int]:
        """Return the bytes that this wrapper adds to the optimizer's: "device" and "host"."""
        return {"device": self._adasum_sums.bytes, "host": 0}

    def _chosen(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs to reduce, each with the tensor to reduce."""
        if not must_reduce(self._adasum_options):
            return []
        chosen = [pair for pair in pairs if not is_marked_local(pair[1])]
        tensors, variables = zip(*chosen, strict=True) if chosen else ((), ())
        ready = self._ready(tensors, variables)
        self._adasum_dtypes |= {variable.dtype.base_dtype for variable in variables}
        if not self._adasum_reduction.agree(ready, variables).any_tensor:
            raise RuntimeError(
                "DistributedOptimizer: expected gradients to reduce over "
                f"{self._adasum_options.process_set.size()} ranks, but got none, so the "
                "replicas would diverge; compute the loss from the variables"
            )
        return list(zip(ready, variables, strict=True))

    def _ready(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Sequence[Any]:
        return prepared(gradients, variables, self._adasum_options)


class _LegacyGradient(_Legacy):
    """The gradient variant: `compute_gradients` returns reduced gradients."""

    _adasum_last: Any = None

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Pair]:
        """As TensorFlow's, reduced over the ranks. Collective when it runs.

        With `backward_passes_per_step`, only the last pass of a window returns reduced gradients,
        and `apply_gradients` steps in that pass only.
        """
        pairs = super().compute_gradients(*args, **kwargs)
        if self._adasum_sums.passes == 1:
            return self._reduced(pairs)
        pairs, last = self._adasum_sums.add(pairs)
        self._adasum_last = last
        present = [pair for pair in pairs if pair[0] is not None]
        found = tf.cond(
            last,
            lambda: [g for g, _ in self._reduced(pairs, exact=False) if g is not None],
            lambda: [gradient for gradient, _ in present],
        )
        by_variable = dict(zip((id(v) for _, v in present), found, strict=True))
        return [(by_variable.get(id(v)), v) for _, v in pairs]

    def _reduced(self, pairs: Sequence[Pair], exact: bool | None = None) -> list[Pair]:
        chosen = self._chosen(pairs)
        if not chosen:
            return list(pairs)
        gradients, variables = zip(*chosen, strict=True)
        reduced = self._adasum_reduction.gradients(gradients, variables, exact=exact)
        by_variable = dict(zip(map(id, variables), reduced, strict=True))
        return [(by_variable.get(id(v), gradient), v) for gradient, v in pairs]

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """As TensorFlow's; with `backward_passes_per_step` in a window's last pass only.

        Raises:
            RuntimeError: the gradients do not come from `compute_gradients`.
        """
        pairs, step = list(grads_and_vars), super().apply_gradients
        if self._adasum_sums.passes == 1:
            return step(pairs, global_step, name)
        if self._adasum_last is None:
            raise RuntimeError(
                "backward_passes_per_step: expected gradients of compute_gradients(), but got "
                "others; call compute_gradients(), or minimize()"
            )
        last, self._adasum_last = self._adasum_last, None
        return tf.cond(last, lambda: tf.group(step(pairs, global_step, name)), tf.no_op)


class _LegacyDelta(_Legacy):
    """The delta variant: `apply_gradients` takes the local step and reduces the changes."""

    def _ready(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Sequence[Any]:
        # A reference variable's value is its memory, which the step changes.
        return [
            None if gradient is None else tf.raw_ops.DeepCopy(x=wide(variable))
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """As TensorFlow's. Collective when it runs, in the last pass of a window."""
        pairs, step = list(grads_and_vars), super().apply_gradients
        if self._adasum_sums.passes == 1:
            return self._apply(pairs, lambda: step(pairs, global_step, name))
        pairs, last = self._adasum_sums.add(pairs)
        return tf.cond(
            last,
            lambda: self._apply(pairs, lambda: step(pairs, global_step, name)),
            tf.no_op,
        )

    def _apply(self, pairs: Sequence[Pair], local_step: Callable[[], Any]) -> Any:
        chosen = self._chosen(pairs)
        with tf.control_dependencies([s for s, _ in chosen if s is not None]):
            # Without a gradient on this rank TensorFlow takes no step.
            some = any(gradient is not None for gradient, _ in pairs)
            step = local_step() if some or not chosen else None
        done = [] if step is None else [step]
        if not chosen:
            return tf.group(*done)
        before, variables = zip(*chosen, strict=True)
        limit = self._adasum_options.clip_delta_norm
        with tf.control_dependencies(done):
            starts, changes = reduce_changes(
                self._adasum_reduction, variables, before, limit
            )
        sums = zip(variables, starts, changes, strict=True)
        return tf.group(
            *(
                variable.assign(tf.cast(start + change, variable.dtype.base_dtype))
                for variable, start, change in sums
            )
        )


def is_distributed(optimizer: Any) -> bool:
    """Return whether `optimizer` is a TF1 one from `DistributedOptimizer`."""
    return isinstance(optimizer, _Legacy)


def wrap(optimizer: tf.compat.v1.train.Optimizer, options: Options) -> Any:
    """Return `optimizer`'s slots and settings in an instance of the op's variant.

    Raises:
        ValueError: AdaSum of changes with an optimizer that undoes them.
        NotImplementedError: local steps, which only Keras optimizers have; windows of passes in
            an elastic job, because new ranks would start in the middle of one.
    """
    if options.local_steps != 1:
        raise NotImplementedError(
            "local_steps: expected 1 with a tf.compat.v1 optimizer, but got "
            f"{options.local_steps}; use a Keras optimizer"
        )
    refuse_records(type(optimizer), options)
    passes = options.backward_passes_per_step
    if passes > 1:
        refuse_elastic("backward_passes_per_step of a tf.compat.v1 optimizer")
    mixin = _LegacyDelta if options.is_delta else _LegacyGradient
    name = f"Distributed{type(optimizer).__name__}"
    distributed = as_dynamic_subclass(optimizer, mixin, name)
    distributed._optimizer = optimizer  # Horovod's name for it
    distributed._adasum_options = options
    distributed._adasum_dtypes = set()
    distributed._adasum_sums = _Sums(passes, options.average_aggregated_gradients)
    distributed._adasum_reduction = Reduction(
        "DistributedOptimizer",
        options,
        many_lists=True,
        optimizer=lambda: optimizer_facts(type(optimizer), {}),
    )
    return distributed
