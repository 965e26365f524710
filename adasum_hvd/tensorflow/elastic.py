"""Elastic training: the job continues when ranks fail, leave or join.

Names and calls are those of Horovod 0.28.1; docs/elastic.md lists the differences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.horovod.elastic.state import SharedState, running
from adasum_hvd.parallel.tensorflow_modes import native
from adasum_hvd.tensorflow import broadcasting, ops
from adasum_hvd.tensorflow.horovod_arguments import warn_without_effect
from adasum_hvd.tensorflow.optimizer import is_distributed
from adasum_hvd.tensorflow.optimizer.slots import inner, local_slots, variables_of

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

Result = TypeVar("Result")
_WITH_VARIABLES = (
    *(keras.Layer, keras.Optimizer, keras.Metric, keras.Variable),
    *(tf.Variable, tf.Module),
)


class _State(SharedState):
    """The common base of TensorFlow's states: shared objects, and committed variables."""

    _agree = staticmethod(ops.agree)
    _gather = staticmethod(broadcasting.allgather_object)
    _broadcast = staticmethod(broadcasting.broadcast_object)

    def __init__(self, **kwargs: Any):
        super().__init__(broadcasting.broadcast_object, mpi_ops.rank, **kwargs)
        self._commit()

    def _trained(self) -> Callable[[Any], bool]:
        # Optimizers and traced functions use no copy of a variable.
        return lambda obj: isinstance(obj, _WITH_VARIABLES)

    def _kept(self) -> list[Any]:
        """Return all variables of a commit."""
        raise NotImplementedError

    def _read(self, variables: Sequence[Any]) -> list[np.ndarray]:
        return [np.array(native(variable).numpy()) for variable in variables]

    def _write(self, variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(variables, values, strict=True):
            native(variable).assign(value)

    def _commit(self) -> None:
        super()._commit()
        self._committed = self._read(self._kept())

    def restore(self) -> None:
        """Restore the values of the last commit."""
        self._write(self._kept(), self._committed)
        super().restore()


class TensorFlowKerasState(_State):
    """A Keras model and its optimizer: committed, restored, and sent to new ranks.

    docs/elastic.md has the values that surviving ranks keep.

    Args:
        model: a Keras model that is built.
        optimizer: by default the one that the model is compiled with. It is built here.
        backend: without effect, for Horovod's scripts: setting it warns with the reason.
        **kwargs: objects that pickle; attributes of the state.

    Raises:
        ValueError: the model is not built, or there is no optimizer.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ):
        what = type(self).__name__
        warn_without_effect(what, backend=backend)
        if not model.built:
            raise ValueError(
                f"{what}: expected a model that is built, but got {model.name} without its "
                "variables; call model.build(input_shape), or the model once"
            )
        self.model = model
        self.optimizer: Any = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise ValueError(
                f"{what}: expected an optimizer, but got none; pass optimizer=, or compile the "
                "model"
            )
        if not self.optimizer.built:
            with keras.name_scope(self.optimizer.name):
                self.optimizer.build(model.trainable_variables)
        if is_distributed(self.optimizer):
            self.optimizer._adasum.is_in_state = True
        super().__init__(**kwargs)

    def _windows(self) -> tuple[list[Any], list[Any]]:
        if not is_distributed(self.optimizer):
            return [], []
        optimizer = inner(self.optimizer)
        return optimizer.windows_of(optimizer._trainable_variables)

    def _given(self) -> list[Any]:
        """Return the variables that new ranks get."""
        common, own = self._windows()
        return [*self.model.weights, *variables_of(self.optimizer), *common, *own]

    def _kept(self) -> list[Any]:
        given = self._given()
        known = set(map(id, given))
        return [*given, *(v for v in self.model.variables if id(v) not in known)]

    def _own(self) -> list[Any]:
        """Return those of them that surviving ranks keep."""
        optimizer = self.optimizer
        is_delta = is_distributed(optimizer) and optimizer._adasum.options.is_delta
        # Not the count of steps, by which all ranks reduce together, and their rate.
        kept = local_slots(optimizer, every=is_delta)
        own = [v for v in optimizer.variables if id(v) in kept]
        own += [weight for weight in self.model.weights if is_marked_local(weight)]
        return own + self._windows()[1]

    def _sync_trained(self, root: int, newest: bool) -> None:
        if is_distributed(self.optimizer):
            inner(self.optimizer).compare_ranks()
        own = self._own() if self._survived else []
        if not newest:  # the root may have taken the step of these sums
            sums = getattr(inner(self.optimizer), "_accumulated_gradients", ())
            lost = set(map(id, (*sums, *self._windows()[1])))
            own = [v for v in own if id(v) not in lost]
        values = self._read(own)
        broadcasting.broadcast_variables(self._given(), root)
        self._write(own, values)


class TensorFlowState(_State):
    """A list of variables: committed, restored, and sent to new ranks.

    Surviving ranks keep the variables that are marked with `mark_worker_local`.

    Args:
        variables: TensorFlow or Keras variables; by default `tf.compat.v1.global_variables()`.
        session: for a TF1 graph, the session of the variables' values; by default the session in
            scope.
        **kwargs: objects that pickle; attributes of the state.

    Raises:
        ValueError: there are no variables.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ):
        self.variables = list(variables or tf.compat.v1.global_variables())
        if not self.variables:
            raise ValueError(
                "TensorFlowState: expected variables, but got none; pass them, because only TF1 "
                "graphs have global ones"
            )
        self.session = session
        super().__init__(**kwargs)

    def _kept(self) -> list[Any]:
        return self.variables

    def _read(self, variables: Sequence[Any]) -> list[np.ndarray]:
        if tf.executing_eagerly():
            return super()._read(variables)
        return [variable.eval(self.session) for variable in variables]

    def _write(self, variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
        if tf.executing_eagerly():
            super()._write(variables, values)
        else:
            for variable, value in zip(variables, values, strict=True):
                variable.load(value, self.session)

    def _sync_trained(self, root: int, newest: bool) -> None:
        own = [v for v in self.variables if self._survived and is_marked_local(v)]
        values = self._read(own)
        if tf.executing_eagerly():
            broadcasting.broadcast_variables(self.variables, root)
        else:
            received = [
                broadcasting.broadcast_object(
                    value, root, f"adasum.elastic.variables.{index}"
                )
                for index, value in enumerate(self._read(self.variables))
            ]
            self._write(self.variables, received)
        self._write(own, values)


# Messages of Horovod, the op, Gloo and NCCL; and lines of a traceback.
_FAILURE = re.compile(
    r"Horovod has (been shut down|not been init)|AdaSum: |/gloo/|nccl"
)
_FRAME = re.compile(r'^\s*File ".*\n?', re.MULTILINE)


def is_failure(error: Exception) -> bool:
    """Return whether an error of TensorFlow is a failure of Horovod, and not of the program."""
    of_program = isinstance(error, tf.errors.InvalidArgumentError)  # the ranks disagree
    if of_program or not isinstance(error, tf.errors.OpError):
        return False
    return _FAILURE.search(_FRAME.sub("", error.message)) is not None


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Return `func` as a function that continues when ranks fail, leave or join, as Horovod's.

    As :func:`adasum_hvd.torch.elastic.run`. Traced functions are used with any number of ranks.

    Args:
        func: its first argument is the state, such as :class:`TensorFlowKerasState`.
    """
    return running(func, mpi_ops.shutdown, ops.start, is_failure)
