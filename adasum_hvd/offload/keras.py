"""`AdamOffload` for Keras 3 on TensorFlow: Adam with its moments on the host CPU.

The arithmetic is TensorFlow's own Adam kernel on the CPU, with eps in the place where MindSpore
has it. The kernel would compute `1 - beta2^t` in float32, with errors up to 3e-5 in the first
steps. The bias correction is therefore a part of the learning rate, in float64.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from adasum_hvd.offload import adam

_HOST = "CPU:0"
_CHECKED = ("beta1", "beta2", "eps", "use_locking", "use_nesterov", "loss_scale",
            "decoupled_weight_decay")  # fmt: skip


@keras.saving.register_keras_serializable(package="adasum_hvd")
class RateVector(LearningRateSchedule):
    """A learning rate per step, counted from 0."""

    def __init__(self, rates: Sequence[float]):
        self.rates = [float(rate) for rate in rates]

    def __call__(self, step: Any) -> tf.Tensor:
        """Return the rate of a step, and after the last one, where callbacks read it, the last."""
        with tf.device(_HOST):
            step = tf.minimum(tf.cast(step, tf.int64), len(self.rates) - 1)
            return tf.gather(tf.constant(self.rates, tf.float32), step)

    def require(self, step: Any) -> None:
        """Fail, by an assertion, unless there is a rate for a step."""
        count = len(self.rates)
        message = (
            f"AdamOffload: lr: expected a rate per step, but got a vector of {count}"
        )
        with tf.device(_HOST):
            limit = tf.constant(count, tf.int64)
            tf.debugging.assert_less(tf.cast(step, tf.int64), limit, message)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"rates": self.rates}


@keras.saving.register_keras_serializable(package="adasum_hvd")
class RateFunction(LearningRateSchedule):
    """A learning rate or weight decay (`of`) from any Python function of the step, counted from 0.

    Keras calls its own callables without the step. In a graph it also runs as plain Python.
    """

    def __init__(self, function: Callable[[int], Any], of: str = "lr"):
        self.function, self.of = function, of

    def __call__(self, step: Any) -> tf.Tensor:
        """Return the value of a step; the step fails unless it is a number >= 0."""

        def value(step: Any) -> float:
            return adam.value_at(self.of, self.function, int(step))

        with tf.device(_HOST):
            found = tf.py_function(value, [tf.cast(step, tf.int64)], tf.float32)
            found.set_shape(())
            return found

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        function = keras.saving.serialize_keras_object(self.function)
        return {"function": function, "of": self.of}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RateFunction:
        """Return the schedule of a configuration from :meth:`get_config`."""
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(function, config.get("of", "lr"))


def _schedule_of(name: str, value: Any) -> Any:
    """Return "lr" or "weight_decay" as a number, or in a form that Keras accepts."""
    elements = value if isinstance(value, list | tuple) else ()
    if any(isinstance(item, dict) or hasattr(item, "assign") for item in elements):
        raise TypeError(
            "AdamOffload: expected a learning rate first, as in Keras, but got variables or "
            "parameter groups, as in torch; pass the variables to build() or apply(), and use an "
            "optimizer for each group"
        )
    value = adam.parse(name, value)
    if isinstance(value, tuple):
        return RateVector(value)
    if not callable(value) or isinstance(value, LearningRateSchedule):
        return value
    try:
        inspect.signature(value).bind(0)
    except (TypeError, ValueError):
        if name == "lr":
            return value  # without arguments, as Keras's own callables
    return RateFunction(value, name)


def after_data(gradients: Iterable[Any]) -> Any:
    """Return a context whose operations wait for all data of the gradients' functions.

    In a graph, `fit` learns by a step without data that its data has ended. No part of that step
    may run, and each rank would run other parts. Gradients may need no data: regularizers'.
    """
    if tf.executing_eagerly():
        return nullcontext()
    refs = tf.resource, tf.variant  # variables' and iterators', always there
    found: Any = {getattr(gradient, "graph", None) for gradient in gradients}
    data = [
        operation
        for graph in found - {None}
        for operation in (graph.get_operations() if graph.building_function else ())
        if "GetNext" in operation.type
        or (operation.type == "Placeholder" and operation.outputs[0].dtype not in refs)
    ]
    with tf.control_dependencies(data):
        ready = tf.no_op()
    return tf.control_dependencies([ready])


@keras.saving.register_keras_serializable(package="adasum_hvd")
class AdamOffload(keras.optimizers.Optimizer):
    """Adam on the host CPU, for variables on any device; docs/adam_offload.md, Keras.

    A variable that is not float32 or float64 on the CPU has a master copy on the host.

    Args:
        learning_rate: a number or a 0-d tensor; a 1-d tensor or iterable with a rate per step;
            a Keras schedule; or a Python function of the step, counted from 0.
        beta1: as :class:`adasum_hvd.offload.optimizer.AdamOffload`'s, like `beta2`, `eps`,
            `use_nesterov` and `loss_scale`.
        use_locking: the kernel locks variable and moments while it updates them.
        weight_decay: L2 penalty >= 0, or the decoupled decay, except for variables with "beta"
            or "gamma" in their path and those of `exclude_from_weight_decay()`; or a schedule, as
            of `learning_rate`.
        decoupled_weight_decay: decay as `keras.optimizers.AdamW` does.
        **kwargs: as for every Keras optimizer; or of other Adams, if they ask for this algorithm.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an argument out of range or of another algorithm.

    References:
        docs/adam_offload.md; docs/mindspore.md.
    """

    slots_that_follow = ("_masters",)  # every change of their variables

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: Any = 0.0,
        loss_scale: float = 1.0,
        name: str = "adam_offload",
        decoupled_weight_decay: bool = False,
        **kwargs: Any,
    ):
        adam.drop_foreign(kwargs)
        # Keras's own weight_decay would decay the variables and not their masters.
        rate = _schedule_of("lr", learning_rate)
        super().__init__(learning_rate=rate, name=name, **kwargs)
        self.beta1 = adam.check("beta1", beta1)
        self.beta2 = adam.check("beta2", beta2)
        self.eps = adam.check("eps", eps)
        self.use_locking = adam.check("use_locking", use_locking)
        self.use_nesterov = adam.check("use_nesterov", use_nesterov)
        self.loss_scale = adam.check("loss_scale", loss_scale)
        decoupled = adam.check("decoupled_weight_decay", decoupled_weight_decay)
        self.decoupled_weight_decay = decoupled
        self.decay = _schedule_of("weight_decay", weight_decay)

    def _get_current_learning_rate(self) -> Any:
        # Keras would pass its count of backward passes.
        if isinstance(self._learning_rate, RateVector | RateFunction):
            return self._learning_rate(self.iterations)
        return super()._get_current_learning_rate()

    def build(self, variables: Sequence[Any]) -> None:
        """Create moments, and master copies if they are needed, on the host."""
        if self.built:
            return
        super().build(variables)
        self._moments: list[tuple[Any, ...]] = []
        self._masters: list[Any] = []
        for variable in variables:
            dtype = "float64" if variable.dtype == "float64" else "float32"
            base = variable.path.replace("/", "_")
            zeros = functools.partial(self.add_variable, variable.shape, "zeros", dtype)
            own = variable.dtype == dtype and "GPU" not in variable.value.device
            with tf.device(_HOST):
                moments = (zeros(name=f"{base}_{n}") for n in ("momentum", "velocity"))
                self._moments.append(tuple(moments))
                # Zeros differ from the variable, so the first step copies the variable.
                self._masters.append(None if own else zeros(name=f"{base}_master"))

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """As Keras's; a step without data, at the end of what `fit` reads, does nothing."""
        grads = list(grads)
        with after_data(grads):
            super().apply(grads, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable and its moments."""
        if isinstance(self._learning_rate, RateVector):
            self._learning_rate.require(self.iterations)
        index = self._get_variable_index(variable)
        variable = self._trainable_variables[index]  # Keras passes TensorFlow's
        momentum, velocity = self._moments[index]
        master = self._masters[index]
        with tf.device(_HOST):
            if master is not None:
                here = tf.identity(variable.value)
                same = tf.cast(master.value, here.dtype) == here
                here = tf.cast(here, master.dtype)
                master.value.assign(tf.where(same, master.value, here))
            weights = variable.value if master is None else master.value
            dtype = weights.dtype
            gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
            decay = self._decay_of(variable, dtype)
            if decay is not None and self.decoupled_weight_decay:
                weights.assign_sub(weights * tf.cast(learning_rate, dtype) * decay)
            elif decay is not None:
                gradient += decay * self.loss_scale * weights
            tf.raw_ops.ResourceApplyAdam(
                var=weights.handle,
                m=momentum.value.handle,
                v=velocity.value.handle,
                beta1_power=tf.zeros((), dtype),
                beta2_power=tf.zeros((), dtype),
                lr=self._corrected(learning_rate, dtype),
                beta1=tf.constant(self.beta1, dtype),
                beta2=tf.constant(self.beta2, dtype),
                epsilon=tf.constant(self.eps, dtype),
                grad=gradient if self.loss_scale == 1.0 else gradient / self.loss_scale,
                use_locking=self.use_locking,
                use_nesterov=self.use_nesterov,
            )  # fmt: skip
            rounded = tf.cast(weights.read_value(), variable.dtype)
        if master is not None:
            variable.value.assign(rounded)

    def _corrected(self, learning_rate: Any, dtype: tf.DType) -> tf.Tensor:
        """Return `lr sqrt(1 - beta2^t) / (1 - beta1^t)`, in float64, for the kernel's betas."""
        step = tf.cast(self.iterations + 1, tf.float64)
        beta1, beta2 = (
            tf.cast(tf.constant(beta, dtype), tf.float64)
            for beta in (self.beta1, self.beta2)
        )
        correction = tf.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
        return tf.cast(tf.cast(learning_rate, tf.float64) * correction, dtype)

    def _decay_of(self, variable: Any, dtype: tf.DType) -> Any:
        """Return the variable's weight decay in this step, or None."""
        decayed = adam.is_decayed(variable.path) and self._use_weight_decay(variable)
        if not decayed or self.decay == 0.0:
            return None
        if callable(self.decay):
            return tf.cast(self.decay(self.iterations), dtype)
        return self.decay

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            **super().get_config(),
            **{key: getattr(self, key) for key in _CHECKED},
            "weight_decay": keras.saving.serialize_keras_object(self.decay),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return the optimizer of a configuration from :meth:`get_config`."""
        decay = config.get("weight_decay", 0.0)
        decay = keras.saving.deserialize_keras_object(decay, custom_objects)
        return super().from_config({**config, "weight_decay": decay}, custom_objects)
