"""The variables that an optimizer keeps for each variable that it trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from adasum_hvd.base.marks import is_marked_local

# Keras's lists that are not state of the step: variables, sums of gradients, and moving averages of
# the weights that all ranks share.
_NO_SLOTS = ("_variables", "_trainable_variables", "_accumulated_gradients",
             "_model_variables_moving_average")  # fmt: skip


def inner(optimizer: Any) -> Any:
    """Return the optimizer inside a loss scale, and any other optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def variables_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's variables; inside a loss scale, Keras leaves out some of Nadam's."""
    listed = optimizer.variables
    known, own = set(map(id, listed)), vars(inner(optimizer)).values()
    unlisted = (v for v in own if isinstance(v, keras.Variable) and id(v) not in known)
    return [*listed, *unlisted]


def slot_lists(optimizer: Any) -> Iterator[tuple[str, list[list[Any]]]]:
    """Yield the name of each list of slots, and the slots of each trainable variable.

    An element is a slot, None, or several (`AdamOffload`'s moments). Some keep dictionaries.
    """
    optimizer = inner(optimizer)
    trained = optimizer._trainable_variables
    for name, held in vars(optimizer).items():
        if name in _NO_SLOTS:
            continue
        if isinstance(held, dict):
            held = [held.get(optimizer._var_key(variable)) for variable in trained]
        if isinstance(held, list) and len(held) == len(trained):
            slots = [
                [slot for slot in tf.nest.flatten(element) if hasattr(slot, "assign")]
                for element in held
            ]
            if any(slots):
                yield name, slots


def local_slots(optimizer: Any, every: bool = False) -> set[int]:
    """Return the ids of the optimizer's variables that differ by rank.

    They are sums of Keras's own accumulation, and slots of worker-local variables, or of `every`
    variable, as in the delta variant.
    """
    trained = inner(optimizer)._trainable_variables
    sums = getattr(inner(optimizer), "_accumulated_gradients", ())
    return set(map(id, sums)) | {
        id(slot)
        for _, slots in slot_lists(optimizer)
        for variable, found in zip(trained, slots, strict=True)
        if every or is_marked_local(variable)
        for slot in found
    }


def copy_of_weights(optimizer: Any) -> str:
    """Return the name of a list of slots that is a copy of the weights, "" if there is none.

    All its slots equal their variables, of which some are not zero. Worker-local variables do not
    count. Slots that follow every change count if they have another precision: their variables do
    not show changes below their own.
    """
    trained = inner(optimizer)._trainable_variables
    following = getattr(inner(optimizer), "slots_that_follow", ())
    for name, slots in slot_lists(optimizer):
        pairs = [
            (tf.convert_to_tensor(variable), [tf.convert_to_tensor(s) for s in found])
            for variable, found in zip(trained, slots, strict=True)
            if not is_marked_local(variable)
        ]
        if name in following:
            if any(
                s.dtype != variable.dtype for variable, found in pairs for s in found
            ):
                return name
            continue
        depth = min((len(found) for _, found in pairs), default=0)
        for k in range(depth):
            if all(_equal(found[k], variable) for variable, found in pairs) and any(
                bool(tf.reduce_any(variable != 0)) for variable, _ in pairs
            ):
                return name
    return ""


def _equal(slot: Any, variable: Any) -> bool:
    if slot.shape != variable.shape:
        return False
    return bool(tf.reduce_all(tf.cast(slot, variable.dtype) == variable))
