"""What outlives a step: sums of gradients, or the weights from before several local steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd.parallel.tensorflow_modes import native

SAVED = "adasum_"  # begins the names of what is saved inside a window only
_SAVED_RANK = f"{SAVED}rank"  # the rank whose sums of gradients a file holds


class Window:
    """Tensors, one per variable, that live until a number of steps has been counted.

    They are no optimizer variables: a plain optimizer can load what was saved between windows.

    Args:
        label: names them in a saved optimizer.
        length: steps in a window; one of a single step keeps nothing.
    """

    def __init__(self, label: str, length: int):
        self._label, self.length = label, length
        self._tensors: dict[int, tf.Variable] = {}
        self._steps: tf.Variable | None = None
        # By id, what this window's steps fill.
        self._filled: frozenset[int] | None = None

    def build(self, variables: Sequence[Any]) -> None:
        """Make room for one tensor per variable."""
        if self.length == 1 or self._steps is not None:
            return
        with tf.init_scope():
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            for variable in variables:
                zeros = tf.zeros(variable.shape, tf.as_dtype(variable.dtype))
                self._tensors[id(native(variable))] = tf.Variable(
                    zeros, trainable=False
                )

    def of(self, variable: Any) -> tf.Variable:
        """Return the tensor of `variable`."""
        return self._tensors[id(native(variable))]

    def variables(self, of: Sequence[Any]) -> list[tf.Variable]:
        """Return the count of steps and the tensors of `of`; none without a window."""
        return [] if self._steps is None else [self._steps, *map(self.of, of)]

    def require_same(self, variables: Sequence[Any]) -> None:
        """Raise unless every step of a window fills the tensors of the same variables.

        A traced function cannot see where a window begins, so that there all windows count as
        one.

        Raises:
            ValueError: this step's are others.
        """
        filled = frozenset(id(native(variable)) for variable in variables)
        if self._filled is None:
            self._filled = filled
        if filled != self._filled:
            raise ValueError(
                "backward_passes_per_step: required gradients of the same variables in every "
                f"pass, got {len(filled)} variables in this pass and {len(self._filled)} in "
                f"an earlier one, {len(filled & self._filled)} of them in both; let "
                "every pass cover all, or give each part of the model an optimizer of its own"
            )

    def at_start(self, action: Callable[[], None]) -> None:
        """Do `action`, at run time, before the first step of a window."""
        assert self._steps is not None
        tf.cond(tf.equal(self._steps, 0), returning(action), lambda: 0)

    def count(self, at_end: Callable[[], None]) -> None:
        """Count a step, and at run time do `at_end` and begin anew when it is the last."""
        if self.length == 1:
            at_end()
            return
        assert self._steps is not None
        steps = self._steps

        def finish() -> None:
            at_end()
            steps.assign(0)
            if tf.executing_eagerly():
                self._filled = None

        done = steps.assign_add(1)
        tf.cond(tf.greater_equal(done, self.length), returning(finish), lambda: 0)

    def abandon(self, action: Callable[[], None]) -> None:
        """Do `action` and begin anew, at run time, if a window is unfinished."""
        if self._steps is None:
            return
        steps = self._steps

        def begin_anew() -> None:
            action()
            steps.assign(0)

        tf.cond(tf.greater(steps, 0), returning(begin_anew), lambda: 0)

    @property
    def steps(self) -> int:
        """The number of steps that an unfinished window has counted. Not in a traced function."""
        return 0 if self._steps is None else int(self._steps)

    @property
    def bytes(self) -> int:
        """How much memory this takes."""
        tensors = self._tensors.values()
        return sum(t.shape.num_elements() * t.dtype.size for t in tensors)

    def save(self, store: Any) -> None:
        """Put what an unfinished window needs into `store`."""
        if self.steps:
            store[f"{SAVED}{self._label}_steps"] = self.steps
            for index, tensor in enumerate(self._tensors.values()):
                store[f"{SAVED}{self._label}_{index}"] = tensor.numpy()

    def load(self, store: Any) -> None:
        """Undo :meth:`save`; a store without this window begins a new one."""
        if self._steps is None:
            return
        self._filled = None
        key = f"{SAVED}{self._label}_steps"
        saved = key in store.keys()  # noqa: SIM118 (a store is no mapping)
        self._steps.assign(store[key] if saved else 0)
        for index, tensor in enumerate(self._tensors.values() if saved else ()):
            tensor.assign(store[f"{SAVED}{self._label}_{index}"])


def save_windows(store: Any, gradients: Window, starts: Window) -> None:
    """Put what unfinished windows need into `store`, which only this rank can load exactly."""
    gradients.save(store)
    starts.save(store)
    if gradients.steps:
        store[_SAVED_RANK] = mpi_ops.rank()


def load_windows(store: Any, gradients: Window, starts: Window) -> None:
    """Undo :func:`save_windows`; warn where `store` holds another rank's sums of gradients."""
    gradients.load(store)
    starts.load(store)
    if not gradients.steps or _SAVED_RANK not in store.keys():  # noqa: SIM118
        return
    saved_rank = int(np.asarray(store[_SAVED_RANK]))
    if saved_rank != mpi_ops.rank():
        warnings.warn(
            "DistributedOptimizer: expected a file that this rank saved, because it holds sums "
            f"of gradients inside a window of backward_passes_per_step, but rank {saved_rank} "
            f"saved it (this is rank {mpi_ops.rank()}). The next step counts that rank's "
            "gradients twice; let every rank save and load its own file, or save between windows",
            stacklevel=4,
        )


def returning(action: Callable[[], None]) -> Callable[[], int]:
    """Return `action` as a branch of `tf.cond`, whose branches must return the same."""

    def branch() -> int:
        action()
        return 0

    return branch
