"""The AdaSum wrap cells: the frameworks' common base, and the checks of the job.

References:
    MindSpore 1.7, `mindspore.nn.AdaSumByGradWrapCell`; docs/mindspore.md.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from adasum_hvd.base import ops
from adasum_hvd.base.agreement import refuse_elastic
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.mindspore.grad_reducer import GradReducer
from adasum_hvd.parallel.context import ParallelContext, check

MINDSPORE_GROUP_SIZE = 8


def check_job(
    context: ParallelContext,
    settings: Mapping[str, object],
    relaxed: bool = False,
    reduced_in_group: bool = False,
) -> None:
    """Raise RuntimeError unless a job meets the constraints of MindSpore's cells.

    `reduced_in_group`: the cell itself reduces the gradients of a group, so the op must average
    equal values and not sum them again.
    """
    check(context, strict=not relaxed)
    if context.gradients_mean is None and (reduced_in_group or not relaxed):
        warnings.warn(
            "AdaSum wrap cell: expected a context with gradients_mean, but got none: gradients "
            "inside a group are averaged here, and summed by MindSpore's default; pass "
            "ParallelContext(..., gradients_mean=True) or False",
            stacklevel=4,
        )
    if relaxed:
        if reduced_in_group and settings["group_op"] == "sum":
            raise RuntimeError(
                "AdaSum wrap cell: expected group_op='average' or 'adasum' with gradient_group, "
                "but got 'sum', which would sum the reduced gradients of gradient_group again; "
                "call hvd.init(group_op='average')"
            )
        return
    sums = not context.averages and not reduced_in_group
    expected = ("sum" if sums else "average", MINDSPORE_GROUP_SIZE)
    actual = (settings["group_op"], settings["group_size"])
    if actual != expected:
        raise RuntimeError(
            "AdaSum wrap cell: expected group_op={!r} and group_size={}, but got {!r} and {}; call "
            "hvd.init(group_op={!r}, group_size={}), or pass relaxed=True".format(
                *expected, *actual, *expected
            )
        )


class WrapCell(ABC):
    """The base of the frameworks' cells.

    Attributes that a cell lacks (`step`, `learning_rate`, ...) are read, set and deleted on
    `cell.optimizer`, the `DistributedOptimizer` inside. Pass that one to schedulers and `compile`.

    Args:
        optimizer: the framework's.
        context: the parallel context to check.
        relaxed: lift the constraints of MindSpore's cells: at least 16 ranks, a power of two,
            groups of 8 ranks averaged (`hvd.init(group_op="average", group_size=8)`).
        gradient_group: a process set, this rank's group. The cell first averages the gradients
            over it (sums them with `gradients_mean=False`), as MindSpore's TrainOneStepCell does.

    Raises:
        RuntimeError: one rank, optimizer sharding, a pipeline, too few ranks or not a power of
            two, other groups; checked in this order, before the type of `optimizer`.
        TypeError: `optimizer` is not one of the framework's.

    Collective: every rank; blocks.
    """

    _own = frozenset({"optimizer", "_group", "_mean", "_reducer"})
    _op: ops.ReduceOp
    _plain: type  # the framework's optimizers
    _plain_name: str
    _reducing: type[GradReducer]
    optimizer: Any

    def __init__(
        self,
        optimizer: Any,
        context: ParallelContext,
        settings: Mapping[str, object],
        relaxed: bool,
        gradient_group: ProcessSet | None,
    ):
        refuse_elastic(type(self).__name__)
        check_job(context, settings, relaxed, gradient_group is not None)
        if not isinstance(optimizer, self._plain):
            raise TypeError(
                f"{type(self).__name__}: expected a {self._plain_name}, but got "
                f"{type(optimizer).__name__}"
            )
        self._group, self._mean = gradient_group, context.averages
        self._reducer: GradReducer | None = None

    def __getattr__(self, name: str) -> Any:
        if name in self._own:  # not set: __init__ has raised
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse a copy: copies of distributed optimizers are plain, so it would reduce nothing."""
        raise TypeError(
            f"{type(self).__name__}: expected no copy or pickle, but got one, which would not "
            "reduce; create a new cell, and load the state dict of the optimizer"
        )

    def __call__(self, gradients: Sequence[Any]) -> Any:
        """Step with `gradients`, one per parameter. Collective: every rank; blocks.

        Returns:
            The optimizer's result; the delta variant's cell returns the updated parameters.

        Raises:
            ValueError: the numbers of gradients and parameters differ, or a gradient is not a
                tensor of its parameter's shape, such as None; before anything is sent.
        """
        parameters, gradients = self.parameters, tuple(gradients)
        self._check(parameters, gradients)
        if self._group is not None:
            gradients = self._reduced_in_group(parameters, gradients)
        result = self._step(parameters, gradients)
        return parameters if self._op is ops.AdasumDelta else result

    def _reduced_in_group(
        self, parameters: tuple[Any, ...], gradients: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        reducer, ids = self._reducer, [*map(id, parameters)]
        # Parameters may have been frozen or unfrozen since the last call.
        if reducer is None or [*map(id, reducer.parameters)] != ids:
            reducer = self._reducing(parameters, self._mean, group=self._group)
            self._reducer = reducer
        return reducer(gradients)

    def _check(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        if len(gradients) != len(parameters):
            raise ValueError(
                f"{type(self).__name__}: expected one gradient per parameter, {len(parameters)}, "
                f"but got {len(gradients)}"
            )
        pairs = zip(parameters, gradients, strict=True)
        for index, (parameter, gradient) in enumerate(pairs):
            if not self._fits(gradient, parameter):
                kind = "None" if gradient is None else type(gradient).__name__
                shape = getattr(gradient, "shape", None)
                got = kind if shape is None else f"a {kind} of shape {tuple(shape)}"
                raise ValueError(
                    f"{type(self).__name__}: expected a gradient of shape "
                    f"{tuple(parameter.shape)} for {self._name_of(index, parameter)}, but got "
                    f"{got}; pass zeros for a parameter that this batch does not use"
                )

    @property
    @abstractmethod
    def parameters(self) -> tuple[Any, ...]:
        """The parameters that have gradients, in the gradients' order."""

    @abstractmethod
    def _fits(self, gradient: Any, parameter: Any) -> bool:
        """Return whether the gradient is a tensor of the parameter's shape, if that is known."""

    @abstractmethod
    def _step(self, parameters: tuple[Any, ...], gradients: Sequence[Any]) -> Any:
        """Take the optimizer's step with checked and reduced gradients."""

    def _name_of(self, index: int, parameter: Any) -> str:
        return f"parameter {index}"
