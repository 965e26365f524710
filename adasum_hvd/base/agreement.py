"""Comparisons of settings and parameters over the ranks, and the errors if they differ."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Words of `compare_settings` for `Options.shared`: what differs, and the remedy.
OPTIONS = (
    "arguments of DistributedOptimizer or the tape",
    "pass the same arguments on every rank",
)
# The same for `optimizer_facts`.
OPTIMIZER = (
    "optimizer",
    "create it alike on every rank; only the learning rate may differ",
)
# What it says of an optimizer's.
HYPERPARAMETERS = (
    "hyperparameters",
    "make the same optimizer on every rank, change its hyperparameters on all of them alike, and "
    "broadcast_optimizer_state() if one rank alone has loaded or read a state",
)
Described = tuple[str, tuple[int, ...], str]  # name, shape, dtype of a parameter


def is_elastic() -> bool:
    """Return whether ranks can join and leave this job (`horovodrun --min-np`)."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def refuse_elastic(caller: str) -> None:
    """Raise NotImplementedError in an elastic job; the caller is for the message."""
    if is_elastic():
        raise NotImplementedError(
            f"{caller}: expected a job with a fixed number of ranks, but got an elastic job "
            "(HOROVOD_ELASTIC=1), whose ranks could hang or train alone; start it with "
            "horovodrun -np N, without --min-np, --max-np and a discovery script"
        )


def refuse_process_set(process_set: Any, all_ranks: object) -> None:
    """Raise ValueError for an unregistered process set.

    In an elastic job, raise NotImplementedError for all but the global one.
    """
    if is_elastic() and process_set is not all_ranks:
        raise NotImplementedError(
            "process_set: expected all ranks in an elastic job, but got "
            f"{process_set}, which ends when ranks come or go; leave it out"
        )
    registered(process_set)


def registered(process_set: Any) -> Any:
    """Return a process set; ValueError if it is not registered, or not any more.

    TensorFlow would reduce over all ranks instead.
    """
    if process_set.process_set_id is None:
        raise ValueError(
            f"process_set: expected one that is registered, but got {process_set}, which is not; "
            "pass it to hvd.init(process_sets=[...]), or set "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1 and call hvd.add_process_set() on every rank"
        )
    return process_set


def comparable(settings: dict[str, object]) -> dict[str, object]:
    """Return the op's settings that must be equal on all ranks."""
    # Excludes the same settings as the fingerprint in horovod/op/settings.cc.
    limits = "timeout_seconds", "stall_seconds", "checkpoint_seconds"
    free = {"kernels", "threads", *limits}
    return {name: value for name, value in settings.items() if name not in free}


def optimizer_facts(
    optimizer_class: type, hyperparameters: Mapping[str, Any]
) -> dict[str, object]:
    """Return the facts of an optimizer that must be equal on all ranks: not rates and names.

    A value that is not a number, a string or a collection of them counts by its type only.

    Example:
        >>> optimizer_facts(dict, {"lr": 0.1, "betas": [0.9, 0.99], "hook": print})
        {'class': 'builtins.dict', 'betas': (0.9, 0.99), 'hook': 'builtin_function_or_method'}
    """
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    free = ("name", "learning_rate", "lr", "initial_lr", "max_lr", "min_lr")
    compared = {k: plain(v) for k, v in hyperparameters.items() if k not in free}
    return {"class": name, **compared}


def plain(value: Any) -> Any:
    """Return a value that can be compared between ranks."""
    if isinstance(value, Mapping):
        return {key: plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if getattr(value, "shape", None) == ():  # a scalar of NumPy or of a framework
        value = value.item() if hasattr(value, "item") else float(value)
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else type(value).__qualname__


def compare_settings(
    by_rank: Sequence[dict[str, Any]],
    rank: int,
    what: str = "ADASUM_HVD_* variables",
    remedy: str = "export them on every host",
    ranks: Sequence[int] = (),
) -> None:
    """Raise ValueError, on every rank, if the ranks' settings differ.

    `by_rank` has each rank's settings by name, and `ranks` their numbers in the job, if these are
    not all ranks. The message names this rank, the kind of settings and the remedy, too.
    """
    ranks, first = ranks or range(len(by_rank)), by_rank[0]
    for other, settings in zip(ranks, by_rank, strict=True):
        # Ranks with other versions can have other names.
        for name in dict.fromkeys([*first, *settings]):
            if settings.get(name) != first.get(name):
                raise ValueError(
                    f"AdaSum: expected the same {what} on all ranks, but got "
                    f"{name}={settings.get(name)} on rank {other} and {first.get(name)} on rank "
                    f"{ranks[0]} (seen by rank {rank}); {remedy}"
                )


def first_difference(
    lists: Sequence[Sequence[Any]], key: Callable[[Any], Any] = lambda entry: entry
) -> tuple[int, list[int]] | None:
    """Return the first position at which lists differ, and which differ from the first list.

    Those are the indices of the lists whose entry at that position is missing or differs, by its
    key, from the first list's. None if all lists are equal.

    Example:
        >>> first_difference(["abc", "abd", "abc", "ab"])
        (2, [1, 3])
    """
    for position in range(max(map(len, lists), default=0)):
        # Slices, which are empty in shorter lists.
        entries = [[*map(key, entry[position : position + 1])] for entry in lists]
        different = [k for k, entry in enumerate(entries) if entry != entries[0]]
        if different:
            return position, different
    return None


def compare_parameters(
    caller: str,
    by_rank: Sequence[Sequence[Described]],
    rank: int,
    names: bool = True,
    ranks: Sequence[int] = (),
    remedy: str = (
        "build the same model on every rank, or mark parameters that differ with "
        "mark_worker_local()"
    ),
) -> None:
    """Raise ValueError, on every rank, if the ranks' lists of parameters to reduce differ.

    Args:
        caller: the function or class, for the message, as are `rank` (this one) and `remedy`.
        by_rank: of each rank of the process set.
        names: compare names, too; False if the framework numbers them by itself.
        ranks: of `by_rank`, numbered in the job; else the message numbers them in the process set.
    """
    difference = first_difference(by_rank, lambda entry: entry if names else entry[1:])
    if difference is None:
        return
    position, (other, *_) = difference
    of_ranks = f" of {list(ranks)}" if ranks else ""
    first, second = "the first rank", f"rank {other} of the process set"
    both = f"{first} and {second}"
    if ranks:
        first, second = f"rank {ranks[0]}", f"rank {ranks[other]}"
        both = f"ranks {ranks[0]} and {ranks[other]}"
    expected, actual = by_rank[0], by_rank[other]
    if position < min(len(expected), len(actual)):
        got = f"{expected[position]} on {first} and {actual[position]} on {second}"
    else:
        got = f"{len(expected)} and {len(actual)} parameters on {both}"
    raise ValueError(
        f"{caller}: expected the same parameters in the same order on all ranks{of_ranks}, but got "
        f"{got} (seen by rank {rank}); {remedy}"
    )
