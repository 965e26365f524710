"""Windows of several steps: sums of gradients, or the weights before the local steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd.parallel.tensorflow_modes import native

SAVED = "adasum_"  # prefix of the names in a file of an unfinished window
_SAVED_RANK = f"{SAVED}rank"  # the rank whose sums of gradients a file holds


class Window:
    """Tensors, one per variable, that are kept for a number of steps; none for one step."""

    def __init__(self, label: str, length: int):
        self._label, self.length = label, length
        # No variables of the optimizer: a plain one loads a file from between windows.
        self._tensors: dict[int, tf.Variable] = {}
        self._steps: tf.Variable | None = None
        # The ids of the variables whose tensors are filled: by this window's eager steps (True),
        # and by traced ones (False), which do not know when a window begins: all count as one.
        self._filled: dict[bool, frozenset[int]] = {}

    def build(self, variables: Sequence[Any]) -> None:
        """Create one tensor per variable."""
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
        """Return the count of steps and the tensors of `of`; nothing if windows have one step."""
        self._filled.pop(True, None)  # the caller may assign other values
        return [] if self._steps is None else [self._steps, *map(self.of, of)]

    def require_same(self, variables: Sequence[Any]) -> None:
        """Raise unless every step fills the tensors of the same variables as those before it."""
        if (eager := tf.executing_eagerly()) and not self.steps:
            self._filled.pop(True, None)
        filled = frozenset(id(native(variable)) for variable in variables)
        if eager not in self._filled:
            self._filled[eager] = filled | self._filled_before()
        if filled != (before := self._filled[eager]):
            raise ValueError(
                "backward_passes_per_step: expected gradients of the same variables in every "
                f"pass, but got {len(filled)} variables in this pass and {len(before)} in "
                f"an earlier one, {len(filled & before)} of them in both; let "
                "every pass use all of them, or use an optimizer for each part of the model"
            )

    def _filled_before(self) -> frozenset[int]:
        """Return the ids of the variables whose tensors an unfinished window has filled."""
        with tf.init_scope():
            if not (tf.executing_eagerly() and self.steps):
                return frozenset()
            return frozenset(i for i, t in self._tensors.items() if np.any(t.numpy()))

    def at_start(self, action: Callable[[], None]) -> None:
        """Run `action` before the first step of a window, at run time."""
        assert self._steps is not None
        run_if(tf.equal(self._steps, 0), action)

    def count(self, at_end: Callable[[], None]) -> None:
        """Count a step; after the last one run `at_end` and start a new window, at run time."""
        if self.length == 1:
            at_end()
            return
        assert self._steps is not None
        done = self._steps.assign_add(1)
        self._end_if(tf.greater_equal(done, self.length), at_end)

    def abandon(self, action: Callable[[], None]) -> None:
        """Run `action` and start a new window if one is unfinished, at run time."""
        if self._steps is not None:
            self._end_if(tf.greater(self._steps, 0), action)

    def _end_if(self, condition: Any, action: Callable[[], None]) -> None:
        """Run `action` and start a new window if `condition` is true, at run time."""
        steps: Any = self._steps

        def end() -> None:
            action()
            steps.assign(0)

        run_if(condition, end)

    @property
    def steps(self) -> int:
        """The number of steps that an unfinished window has counted. Not in a traced function."""
        return 0 if self._steps is None else int(self._steps)

    @property
    def bytes(self) -> int:
        """The memory of the tensors."""
        tensors = self._tensors.values()
        return sum(t.shape.num_elements() * t.dtype.size for t in tensors)

    def save(self, store: Any) -> None:
        """Write the variables of an unfinished window to `store`."""
        if self.steps:
            store[f"{SAVED}{self._label}_steps"] = self.steps
            for index, tensor in enumerate(self._tensors.values()):
                store[f"{SAVED}{self._label}_{index}"] = tensor.numpy()

    def load(self, store: Any) -> None:
        """Read what :meth:`save` wrote; a store without this window starts a new one."""
        if self._steps is None:
            return
        self._filled.clear()
        key = f"{SAVED}{self._label}_steps"
        saved = key in store.keys()  # noqa: SIM118 (a store is no mapping)
        self._steps.assign(store[key] if saved else 0)
        for index, tensor in enumerate(self._tensors.values() if saved else ()):
            tensor.assign(store[f"{SAVED}{self._label}_{index}"])


def save_windows(store: Any, gradients: Window, starts: Window) -> None:
    """Write unfinished windows to `store`, which only this rank can load exactly."""
    gradients.save(store)
    starts.save(store)
    if gradients.steps:
        store[_SAVED_RANK] = mpi_ops.rank()


def load_windows(store: Any, gradients: Window, starts: Window) -> None:
    """Read unfinished windows; warn if `store` holds another rank's sums of gradients."""
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


def run_if(condition: Any, action: Callable[[], None]) -> None:
    """Run `action` if the boolean scalar `condition` is true, at run time; if it is True, now."""
    if condition is True:
        action()
        return

    def branch() -> int:  # the branches of tf.cond must return the same
        action()
        return 0

    tf.cond(condition, branch, lambda: 0)
