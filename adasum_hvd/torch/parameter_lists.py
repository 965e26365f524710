"""The comparison of parameter lists over the ranks that reduce them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adasum_hvd.base.agreement import compare_parameters

Ranks = tuple[int, ...]
_REMEDY = (
    "build the same model on every rank, and freeze and unfreeze on all ranks in the same step, "
    "because pipeline stages and shards cannot be reduced. Mark parameters that differ with "
    "mark_worker_local(), or with mark_replicated_over() the ranks that hold them"
)


def compare_parameter_lists(
    by_rank: Mapping[int, Mapping[Ranks, Sequence[Any]]], rank: int
) -> None:
    """Raise unless every set of ranks has one list of parameters.

    Args:
        by_rank: by rank and by set of ranks that it reduces over, the (name, shape, dtype) of
            the parameters, in order. Equal on all ranks, so that every rank raises.
        rank: this rank, for the message.

    Raises:
        ValueError: names the first difference and the ranks.
    """
    for ranks in sorted({ranks for lists in by_rank.values() for ranks in lists}):
        outside = [holder for holder in ranks if holder not in by_rank]
        if outside:
            raise ValueError(
                "DistributedOptimizer: expected marked process sets inside the optimizer's own, "
                f"but got {list(ranks)} with rank {outside[0]} outside of {list(by_rank)} (seen "
                f"by rank {rank}); pass the optimizer a process set that contains them"
            )
        lists = [by_rank[holder].get(ranks, ()) for holder in ranks]
        compare_parameters(
            "DistributedOptimizer", lists, rank, ranks=ranks, remedy=_REMEDY
        )
