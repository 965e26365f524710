"""The AdaSum wrap cells: what the frameworks' own share, and what a job must be for them.

References:
    Seed 002; SEEDS rows 1A and 1B.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adasum_hvd.common import ops
from adasum_hvd.common.agreement import refuse_elastic
from adasum_hvd.common.options import ProcessSet
from adasum_hvd.mindspore.context import ParallelContext, check
from adasum_hvd.mindspore.grad_reducer import GradReducer

SEED_GROUP_SIZE = 8


class Forwarding:
    """Reads, sets and deletes attributes of `optimizer`, but for those in `_own`."""

    _own: frozenset[str]
    optimizer: Any

    def __getattr__(self, name: str) -> Any:
        if name in self._own:  # not there yet: __init__ has raised
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.optimizer, name)


def check_job(
    context: ParallelContext,
    settings: Mapping[str, object],
    relaxed: bool = False,
    reduced_in_group: bool = False,
) -> None:
    """Check that a job meets the constraints of MindSpore's cells.

    Args:
        context: the job's parallel context.
        settings: the op's settings, as `hvd.settings()` returns them.
        relaxed: lift the constraints that our op does not need: any number of ranks from
            two, any groups.
        reduced_in_group: the cell itself reduces gradients in the group (`gradient_group`);
            the op then averages what is equal already, and must not sum it once more.

    Raises:
        RuntimeError: a parallel mode or number of ranks that is refused, or, unless
            `relaxed`, groups other than of 8 ranks averaged (summed, where the context says
            `gradients_mean=False` and the op is to do it); with `reduced_in_group`, groups
            that the op sums.

    Warns that the groups are averaged, if the context leaves `gradients_mean` unset.
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
                "AdaSum wrap cell: required group_op='average' or 'adasum' with gradient_group, "
                "got 'sum', which would sum what gradient_group has reduced already; call "
                "hvd.init(group_op='average')"
            )
        return
    sums = not context.averages and not reduced_in_group
    required = ("sum" if sums else "average", SEED_GROUP_SIZE)
    found = (settings["group_op"], settings["group_size"])
    if found != required:
        raise RuntimeError(
            "AdaSum wrap cell: required group_op={!r} and group_size={}, got {!r} and {}; call "
            "hvd.init(group_op={!r}, group_size={}), or pass relaxed=True".format(
                *required, *found, *required
            )
        )


class WrapCell(Forwarding, ABC):
    """A distributed optimizer that is called with one gradient per parameter.

    What the frameworks' cells share; they say what an optimizer is, and how it is distributed,
    steps and names its parameters.

    Args:
        optimizer: the framework's.
        context: the job's parallel context.
        settings: the op's, as `hvd.settings()` returns them.
        relaxed: as :func:`check_job`'s.
        gradient_group: a process set, this rank's group: gradients given to the cell are
            averaged over it (summed with `gradients_mean=False`) before anything else.
        distribute: returns the distributed optimizer, once all checks have passed.

    Raises:
        RuntimeError: as :func:`check_job`; before the type of `optimizer` is looked at.
        TypeError: `optimizer` is none of the framework's.
        NotImplementedError: the job is elastic: no number of ranks can be checked.
    """

    _own = frozenset({"optimizer", "_group", "_mean", "_reducer"})
    _op: ops.ReduceOp
    _plain: type  # the framework's optimizers
    _plain_name: str
    _reducing: type[GradReducer]

    def __init__(
        self,
        optimizer: Any,
        context: ParallelContext,
        settings: Mapping[str, object],
        relaxed: bool,
        gradient_group: ProcessSet | None,
        distribute: Callable[[], Any],
    ):
        refuse_elastic(type(self).__name__)
        check_job(context, settings, relaxed, gradient_group is not None)
        if not isinstance(optimizer, self._plain):
            raise TypeError(
                f"{type(self).__name__}: required a {self._plain_name}, got "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = distribute()
        self._group, self._mean = gradient_group, context.averages
        self._reducer: GradReducer | None = None

    def __call__(self, gradients: Sequence[Any]) -> Any:
        """Step with `gradients`, one per parameter.

        None is refused in every framework: MindSpore's cells get all gradients, and a rank that
        left one out would make the others of a `gradient_group` wait for it.

        Returns:
            What the optimizer returns; the delta variant's cell the updated parameters.

        Raises:
            ValueError: another number of gradients than of parameters, no tensor, or a gradient
                of another shape than its parameter's; before anything is sent.

        Collective: every rank; blocks.
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
        # Parameters may have been frozen, or come to be trained, since.
        if reducer is None or [*map(id, reducer.parameters)] != ids:
            reducer = self._reducing(parameters, self._mean, group=self._group)
            self._reducer = reducer
        return reducer(gradients)

    def _check(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        what = type(self).__name__
        if len(gradients) != len(parameters):
            raise ValueError(
                f"{what}: required one gradient per parameter, {len(parameters)}, got "
                f"{len(gradients)}"
            )
        pairs = zip(parameters, gradients, strict=True)
        for index, (parameter, gradient) in enumerate(pairs):
            if self._fits(gradient, parameter):
                continue
            wanted, shape = tuple(parameter.shape), getattr(gradient, "shape", None)
            if shape is None or tuple(shape) == wanted:  # no tensor of this framework
                kind = "None" if gradient is None else type(gradient).__name__
                got = f"{kind}; give zeros for a parameter that this batch does not use"
            else:
                got = f"one of shape {tuple(shape)}"
            raise ValueError(
                f"{what}: required a gradient of shape {wanted} for "
                f"{self._name_of(index, parameter)}, got {got}"
            )

    @property
    @abstractmethod
    def parameters(self) -> tuple[Any, ...]:
        """The parameters that gradients are for, in the gradients' order."""

    @abstractmethod
    def _fits(self, gradient: Any, parameter: Any) -> bool:
        """Return whether it is a tensor of the parameter's shape, as far as that is known."""

    @abstractmethod
    def _step(self, parameters: tuple[Any, ...], gradients: Sequence[Any]) -> Any:
        """Take the optimizer's step with gradients that were checked and reduced."""

    def _name_of(self, index: int, parameter: Any) -> str:
        return f"parameter {index}"
