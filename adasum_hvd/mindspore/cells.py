"""What the AdaSum wrap cells of all frameworks check before they wrap an optimizer.

References:
    Seed 002; SEEDS rows 1A and 1B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adasum_hvd.mindspore.context import ParallelContext, check

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
    """
    check(context, strict=not relaxed)
    if relaxed:
        if reduced_in_group and settings["group_op"] == "sum":
            raise RuntimeError(
                "AdaSum wrap cell: required group_op='average' or 'adasum' with gradient_group, "
                "got 'sum', which would sum what gradient_group has reduced already; call "
                "hvd.init(group_op='average')"
            )
        return
    sums = not context.gradients_mean and not reduced_in_group
    required = ("sum" if sums else "average", SEED_GROUP_SIZE)
    found = (settings["group_op"], settings["group_size"])
    if found != required:
        raise RuntimeError(
            "AdaSum wrap cell: required group_op={!r} and group_size={}, got {!r} and {}; call "
            "hvd.init(group_op={!r}, group_size={}), or pass relaxed=True".format(
                *required, *found, *required
            )
        )


def check_gradients(
    what: str,
    names: Sequence[str],
    required: Sequence[Sequence[int | None]],
    found: Sequence[Sequence[int | None] | str],
) -> None:
    """Check that a cell got a gradient of the right shape for every parameter.

    None is refused in every framework: MindSpore's cells get all gradients, and a rank that left
    one out would make the others of a `gradient_group` wait for it.

    Args:
        what: the cell, for messages.
        names: the parameters' names.
        required: their shapes; None in a shape is any number.
        found: the gradients' shapes; the name of its type for what is no tensor.

    Raises:
        ValueError: another number of gradients than of parameters, no tensor, or another shape.
    """
    if len(found) != len(required):
        raise ValueError(
            f"{what}: required one gradient per parameter, {len(required)}, got {len(found)}"
        )
    for name, wanted, shape in zip(names, required, found, strict=True):
        if isinstance(shape, str):
            raise ValueError(
                f"{what}: required a gradient of shape {tuple(wanted)} for {name}, got {shape}; "
                "give zeros for a parameter that this batch does not use"
            )
        fits = len(shape) == len(wanted) and all(
            None in pair or pair[0] == pair[1]
            for pair in zip(shape, wanted, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{what}: required a gradient of shape {tuple(wanted)} for {name}, got one of "
                f"shape {tuple(shape)}"
            )
