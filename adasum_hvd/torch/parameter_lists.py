"""Do the ranks that reduce a parameter agree on it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adasum_hvd.agreement import difference

Ranks = tuple[int, ...]


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
        first = ranks[0]
        for other in ranks:
            if other not in by_rank:
                raise ValueError(
                    "DistributedOptimizer: required marked process sets inside the "
                    f"optimizer's own, got {list(ranks)} with rank {other} outside of "
                    f"{list(by_rank)} (this is rank {rank})"
                )
            expected, found = (
                by_rank[first].get(ranks, ()),
                by_rank[other].get(ranks, ()),
            )
            what_differs = difference(
                expected,
                found,
                f"rank {first}",
                f"rank {other}",
                f"ranks {first} and {other}",
            )
            if what_differs:
                raise ValueError(
                    "DistributedOptimizer: required the same parameters in the same order on "
                    f"all ranks of {list(ranks)}, got {what_differs} "
                    f"(this is rank {rank}); build the model alike: a stage of a pipeline or a "
                    "shard on each rank cannot be reduced. What differs can be marked with "
                    "mark_worker_local(), or mark_replicated_over() the ranks that hold it"
                )
