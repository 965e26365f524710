"""Do the ranks that reduce a parameter agree on it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adasum_hvd.common.agreement import compare_parameters

Ranks = tuple[int, ...]
_REMEDY = (
    "build the model alike: a stage of a pipeline or a shard on each rank cannot be reduced. "
    "What differs can be marked with mark_worker_local(), or mark_replicated_over() the ranks "
    "that hold it"
)


def compare_parameter_lists(
    by_rank: Mapping[int, Mapping[Ranks, Sequence[Any]]], rank: int
) -> None:
    """Raise unless every set of ranks has one list of parameters.

    Args:
        by_rank: for every rank: for every set of ranks that it reduces over, the (name,
            shape, dtype) of the parameters, in order. The same on all ranks, so that all
            come to the same conclusion.
        rank: the caller's, for the message.

    Raises:
        ValueError: names the first difference and the ranks.
    """
    for ranks in sorted({ranks for lists in by_rank.values() for ranks in lists}):
        outside = [holder for holder in ranks if holder not in by_rank]
        if outside:
            raise ValueError(
                "DistributedOptimizer: expected marked process sets inside the optimizer's own, "
                f"got {list(ranks)} with rank {outside[0]} outside of {list(by_rank)} (this is "
                f"rank {rank})"
            )
        theirs = [by_rank[holder].get(ranks, ()) for holder in ranks]
        compare_parameters(
            "DistributedOptimizer", theirs, rank, ranks=ranks, remedy=_REMEDY
        )
