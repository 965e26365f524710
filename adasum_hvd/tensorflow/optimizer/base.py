"""The common base of the gradient and the delta variant of the Keras optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from adasum_hvd.base.agreement import is_elastic, optimizer_facts
from adasum_hvd.base.dynamic_subclass import as_instance_of
from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.base.options import Options
from adasum_hvd.offload.keras import after_data
from adasum_hvd.tensorflow.optimizer.saving import saved_config
from adasum_hvd.tensorflow.optimizer.window import (
    SAVED,
    Window,
    load_windows,
    save_windows,
)
from adasum_hvd.tensorflow.reduction import Reduction, must_reduce
from adasum_hvd.tensorflow.reduction.lists import Agreed, name_of

# Keras's optimizers that let others take the step; MultiOptimizer is not in every Keras 3.
MULTI: Any = getattr(keras.optimizers, "MultiOptimizer", ())
AROUND = (keras.optimizers.LossScaleOptimizer, MULTI)


class State:
    """The state that a plain optimizer lacks; Keras would take variables in lists as its own."""

    def __init__(self, options: Options, facts: Callable[[], dict[str, object]]):
        self.options = options
        self.reducing = must_reduce(options)
        self.reduction = Reduction("DistributedOptimizer", options, optimizer=facts)
        self.gradients = Window("gradients", options.backward_passes_per_step)
        self.starts = Window("starts", options.local_steps if self.reducing else 1)
        self.windows = self.gradients, self.starts
        # Passed from one method that Keras calls in a step to the next.
        self.step_variables: list[Any] = []
        self.start_values: dict[int, Any] = {}  # by the variable's index
        # Indices of the variables with a gradient on this rank.
        self.present: frozenset[int] = frozenset()
        self.used: dict[int, Any] = {}  # whether any rank has a gradient, by index
        self.did_reduce = False
        # Whether the last reduced values are finite; only under a loss scale.
        self.finite: tf.Variable | None = None
        self.is_in_state = False  # of an elastic job

    def watch_overflow(self) -> None:
        """Record after each reduction whether its results are finite."""
        with tf.init_scope():
            self.finite = tf.Variable(True, trainable=False)

    def reduced(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables that are reduced, and record that this step reduces."""
        chosen = [variable for variable in variables if not is_marked_local(variable)]
        self.did_reduce = bool(chosen)
        return chosen


class KerasDistributed(keras.optimizers.Optimizer):
    """Accumulation, checks and saving; a mixin before the user's optimizer class.

    Keras 3 takes a step in this order (tests/unit/test_tensorflow_internals.py): `apply`,
    `_clip_gradients`, weight decay, `_backend_update_step`, moving averages and constraints.
    """

    _base: type  # the user's class
    _adasum: State

    def _configure(self, options: Options) -> None:
        self.__dict__["_adasum"] = State(options, self._facts)
        if self.built:
            self._build_windows()

    def _facts(self) -> dict[str, object]:
        try:
            with tf.init_scope():
                config = self._plain().get_config()
        # The user's class may raise anything, and one rank must not stop alone.
        except Exception as error:
            config = {"get_config()": type(error).__name__}
        return optimizer_facts(self._base, config)

    def _build_windows(self) -> None:
        self._adasum.reduction.number(self._trainable_variables)
        for window in self._adasum.windows:
            window.build(self._trainable_variables)

    def build(self, variables: Any) -> None:
        """As Keras's, but eagerly, because some slots start as copies of the weights."""
        # Keras before 3.10 gives no other sign of an optimizer around.
        self._refuse_around(sys._getframe(1).f_locals.get("self"))
        with tf.init_scope():
            super().build(variables)
        self._build_windows()

    def _refuse_around(self, caller: Any) -> None:
        # A loss scale of this package watches for overflows.
        if isinstance(caller, AROUND) and self._adasum.finite is None:
            raise RuntimeError(
                "DistributedOptimizer: expected to be the outermost optimizer, but is inside a "
                f"{type(caller).__name__}. A LossScaleOptimizer (compile() adds one under "
                "mixed_float16) would let each rank decide by its own gradients whether to skip "
                "a step. Use DistributedOptimizer(LossScaleOptimizer(optimizer)), or "
                "adasum_hvd.tensorflow.keras.compile(model, optimizer, ...). For a "
                "MultiOptimizer reduce the gradients with DistributedGradientTape, and pass them "
                "to a MultiOptimizer of plain optimizers"
            )

    # ---- the step ----

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """As Keras's, with one reduction per step. Collective; blocks (eagerly)."""
        grads = list(grads)
        if trainable_variables is None:
            if not self.built:
                super().apply(grads)  # raises
            trainable_variables = self._trainable_variables
        variables = list(trainable_variables)
        if not self.built:
            if not variables:
                raise ValueError(
                    "apply: expected the variables in the first step, but got none; call "
                    "build(variables) before, or pass each variable, with None as its gradient"
                )
            # Before any tf.cond, whose branches must not create variables.
            with keras.name_scope(self.name):
                self.build(variables)
        self._refuse_overwritten(variables)
        self._refuse_lost_windows()
        self._refuse_executions()
        grads = self._prepared(grads, variables)
        window = self._adasum.gradients
        with after_data(grads):
            if window.length == 1:
                self._checked_apply(grads, variables)
            else:
                self._accumulate(window, grads, variables)

    def _prepared(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients in the form in which they are accumulated and applied."""
        if len(grads) != len(variables):
            raise ValueError(
                f"apply: expected one gradient per variable, {len(variables)}, but got "
                f"{len(grads)}; pass None for a variable without a gradient"
            )
        return grads

    def _refuse_overwritten(self, variables: Sequence[Any]) -> None:
        for variable in variables if self._adasum.reducing else ():
            if getattr(variable, "overwrite_with_gradient", False):
                raise NotImplementedError(
                    f"DistributedOptimizer: expected variables that a step changes, but got "
                    f"{name_of(variable)}, which its gradient overwrites (float8 training)"
                )

    def _refuse_lost_windows(self) -> None:
        windows = any(window.length > 1 for window in self._adasum.windows)
        if is_elastic() and windows and not self._adasum.is_in_state:
            raise RuntimeError(
                "DistributedOptimizer: expected an optimizer in a TensorFlowKerasState or "
                "KerasState, because the job is elastic and it has backward_passes_per_step or "
                "local_steps, but it is in none; pass it to the state, so that new ranks start "
                "inside the window of the others"
            )

    def _refuse_executions(self) -> None:
        # If the data ends inside an execution of an old Keras, TensorFlow cancels the steps
        # before, at another place on each rank.
        version = tuple(map(int, keras.__version__.split(".")[:2]))
        if version >= (3, 7) or not self._adasum.reducing:
            return
        graph: Any = tf.compat.v1.get_default_graph()
        while graph is not None:
            if getattr(graph, "name", "") == "multi_step_on_iterator":
                raise NotImplementedError(
                    "steps_per_execution: expected 1 with Keras before 3.7, but got more. If the "
                    "data ends inside an execution, each rank stops at a different step; "
                    "install Keras 3.7 or newer"
                )
            graph = getattr(graph, "outer_graph", None)

    def _accumulate(
        self, window: Window, grads: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        pairs = zip(variables, grads, strict=True)
        window.require_same([v for v, grad in pairs if grad is not None])
        sums = [window.of(variable) for variable in variables]
        for total, grad in zip(sums, grads, strict=True):
            if grad is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(grad), total.dtype))

        average = self._adasum.options.average_aggregated_gradients

        def step() -> None:
            totals = [
                None if grad is None else total.read_value()
                for total, grad in zip(sums, grads, strict=True)
            ]
            if average:
                totals = [t if t is None else t / window.length for t in totals]
            self._checked_apply(totals, variables)
            for total in sums:
                total.assign(tf.zeros_like(total))

        window.count(at_end=step)

    def _checked_apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        state = self._adasum
        state.did_reduce = False
        # Keras takes no step while it accumulates. A graph contains the step in any case.
        every = self.gradient_accumulation_steps
        pending = (
            every and tf.executing_eagerly() and (int(self._iterations) + 1) % every
        )
        if state.reducing and self._trainable_variables:
            self._check_variables_are_known(variables)
            indices = map(self._get_variable_index, variables)
            pairs = zip(indices, grads, strict=True)
            present = {index: grad for index, grad in pairs if grad is not None}
            if present and len(present) < len(grads):
                self._filter_empty_gradients(grads, variables)  # warns
            self._apply_together(present)
        else:
            super().apply(grads, variables)
        if grads and state.reducing and not state.did_reduce and not pending:
            raise RuntimeError(
                "DistributedOptimizer: expected a step that reduces over "
                f"{state.options.process_set.size()} ranks, but got one of {self._base.__name__} "
                "that reduced nothing, so the replicas would diverge; leave some variables "
                "that are not worker-local, and use an optimizer that steps as Keras's do"
            )

    def _apply_together(self, present: dict[int, Any]) -> None:
        """Take a step with all ranks; `present` are the gradients that this one has, by index."""
        raise NotImplementedError

    def _require_any(self, agreed: Agreed) -> Agreed:
        if agreed.kinds and not agreed.any_tensor:
            raise ValueError(
                "apply: expected a gradient of at least one variable on some rank, but got none on "
                f"all {self._adasum.options.process_set.size()}; is the loss computed from the "
                "variables?"
            )
        return agreed

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self._adasum.step_variables = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _note_finite(self, reduced: Sequence[Any]) -> Any:
        """Return whether all of `reduced` is finite, equally on all ranks; None without a scale."""
        flag = self._adasum.finite
        if flag is None or not reduced:
            return None
        # Every rank holds the same bits, so this needs no reduction of its own.
        values = (getattr(tensor, "values", tensor) for tensor in reduced)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])
        flag.assign(finite)
        return finite

    # ---- elastic jobs ----

    def compare_ranks(self) -> None:
        """Compare variables and options with the ranks of an elastic job. Collective; blocks."""
        variables = self._trainable_variables
        kept = [v for v in variables if not is_marked_local(v)]
        self._adasum.reduction.compare_all(kept, len(kept) < len(variables))

    def windows_of(
        self, variables: Sequence[Any]
    ) -> tuple[list[tf.Variable], list[tf.Variable]]:
        """Return the shared variables of unfinished windows, and those that each rank owns."""
        sums, starts = (w.variables(variables) for w in self._adasum.windows)
        return [*sums[:1], *starts], sums[1:]

    # ---- memory, saved models ----

    def extra_bytes(self) -> dict[str, int]:
        """Return the bytes that this wrapper adds to the optimizer's: "device" and "host"."""
        return {"device": sum(w.bytes for w in self._adasum.windows), "host": 0}

    @property
    def window_variables(self) -> list[tf.Variable]:
        """The variables of unfinished windows that all ranks share: step counts and starts."""
        kept = [v for v in self._trainable_variables if not is_marked_local(v)]
        return self.windows_of(kept)[0]

    def save_own_variables(self, store: Any) -> None:
        """As Keras's; inside a window also the window's variables."""
        super().save_own_variables(store)
        save_windows(store, *self._adasum.windows)

    def load_own_variables(self, store: Any) -> None:
        """As Keras's; a plain optimizer's file starts new windows."""
        keys = [key for key in store.keys() if not key.startswith(SAVED)]  # noqa: SIM118
        super().load_own_variables({key: store[key] for key in keys})
        load_windows(store, *self._adasum.windows)

    def get_config(self) -> dict[str, Any]:
        """Return the plain optimizer, serialized, and this wrapper's arguments."""
        return saved_config(self._plain(), self._adasum.options)

    def _plain(self) -> Any:
        """Return an optimizer of the user's class with this one's variables and settings."""
        plain = as_instance_of(self, self._base)
        del plain.__dict__["_adasum"]
        return plain
