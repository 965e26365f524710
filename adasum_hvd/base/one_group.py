"""The warning of groups that leave AdaSum nothing to combine."""

from __future__ import annotations

import warnings


def warn_of_one_group(
    group_op: str, group_size: int, rank: int, ranks: int, on_host: int
) -> None:
    """Warn on the first rank if all ranks are in one group.

    Args:
        group_op: how the ranks of one group are joined.
        group_size: number of ranks in a group; 0 means that a host is a group.
        rank: this rank.
        ranks: number of ranks.
        on_host: number of them on this host.
    """
    size = group_size or on_host
    if group_op != "adasum" and 1 < ranks <= size and rank == 0:
        warnings.warn(
            f"AdaSum: expected at least 2 groups, but got one group of all {ranks} ranks "
            f"(group_size={size}), which is reduced by {group_op}, so AdaSum has nothing to "
            'combine; start more ranks, set a smaller group_size, or set group_op="adasum"',
            stacklevel=4,
        )
