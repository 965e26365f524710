"""What must be the same on all ranks, and the errors where it is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

# What `compare_settings` says of `Options.shared`.
OPTIONS = (
    "arguments of DistributedOptimizer or the tape",
    "pass the same ones on every rank",
)
Described = tuple[str, tuple[int, ...], str]  # name, shape, dtype of a parameter


def refuse_elastic(what: str) -> None:
    """Raise NotImplementedError in an elastic job, whose ranks come and go.

    Args:
        what: who asks, for the message.
    """
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise NotImplementedError(
            f"{what}: required a job with a fixed number of ranks, got an elastic one "
            "(HOROVOD_ELASTIC=1), in which ranks would wait for one another or train alone; "
            "start it with horovodrun -np N, without --min-np, --max-np and a discovery script"
        )


def comparable(settings: dict[str, object]) -> dict[str, object]:
    """Return the settings of the op that must agree: all but those that are a rank's own."""
    free = (
        "kernels",
        "threads",
        "timeout_seconds",
    )  # as native/op/settings.cc's fingerprint
    return {name: value for name, value in settings.items() if name not in free}


def compare_settings(
    theirs: Sequence[dict[str, Any]],
    rank: int,
    what: str = "ADASUM_HVD_* variables",
    remedy: str = "export them on every host",
    ranks: Sequence[int] = (),
) -> None:
    """Compare every rank's settings.

    Args:
        theirs: every rank's, by name: :func:`comparable` of the op's, or `Options.shared`.
        rank: this rank.
        what: what they are, for the message.
        remedy: what to do where they differ, for the message.
        ranks: whose they are, in the job; all of its ranks when empty.

    Raises:
        ValueError: they differ; on every rank.
    """
    ranks = ranks or range(len(theirs))
    for other, settings in zip(ranks, theirs, strict=True):
        first = theirs[0]
        names = dict.fromkeys(
            [*first, *settings]
        )  # of other versions, not the same ones
        different = [name for name in names if settings.get(name) != first.get(name)]
        if different:
            name = different[0]
            raise ValueError(
                f"AdaSum: required the same {what} on all ranks, got "
                f"{name}={settings.get(name)} on rank {other} and {first.get(name)} on rank "
                f"{ranks[0]} (this is rank {rank}); {remedy}"
            )


def difference(
    expected: Sequence[Any],
    found: Sequence[Any],
    first: str,
    second: str,
    both: str,
    essence: Callable[[Any], Any] = lambda described: described,
) -> str:
    """Say how two lists of parameters differ; nothing where they do not.

    Args:
        expected: the (name, shape, dtype) of every parameter of one rank.
        found: those of another rank.
        first: what to call the one, such as "rank 0".
        second: what to call the other.
        both: what to call the two, such as "ranks 0 and 1".
        essence: what of a parameter has to be equal.
    """
    pairs = zip(expected, found, strict=False)
    pair = next(((a, b) for a, b in pairs if essence(a) != essence(b)), None)
    if pair:
        return f"{pair[0]} on {first} and {pair[1]} on {second}"
    if len(expected) != len(found):
        return f"{len(expected)} and {len(found)} parameters on {both}"
    return ""


def compare_parameters(
    what: str, theirs: Sequence[Sequence[Described]], rank: int, names: bool = True
) -> None:
    """Compare every rank's list of what will be reduced.

    Args:
        what: who asks, for the message.
        theirs: (name, shape, dtype) of every parameter of every rank of the process set.
        rank: this rank, in the job.
        names: compare names too, where the framework does not count them up.

    Raises:
        ValueError: the lists differ; on every rank.
    """

    for other, found in enumerate(theirs):
        what_differs = difference(
            theirs[0],
            found,
            "the first rank",
            f"rank {other} of the process set",
            f"the first rank and rank {other} of the process set",
            lambda described: described if names else described[1:],
        )
        if what_differs:
            raise ValueError(
                f"{what}: required the same parameters in the same order on "
                f"all ranks, got {what_differs} (this is rank {rank}); build the model "
                "alike, or mark what differs with mark_worker_local()"
            )
