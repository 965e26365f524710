"""Groups: which ranks are reduced together first, and how.

The native op reads its settings from the environment at every `init`, so arguments become
environment variables here, before Horovod starts; that they are equal on all ranks is
checked by the op itself, in the first reduction of every process set.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from adasum_hvd.common import ops
from adasum_hvd.common.options import check_count

_before: dict[str, str | None] = {}  # what the last `configure` has replaced


def configure(group_op: str | None = None, group_size: int | None = None) -> None:
    """Set the groups of the next `init`.

    Args:
        group_op: how the ranks of one group are reduced before AdaSum runs over the groups:
            "adasum" (all the way down, the default), "average" or "sum". A rank that has
            joined counts in the average's divisor, as in Horovod's own Average.
        group_size: that many consecutive ranks form a group (MindSpore: 8); None leaves
            `ADASUM_HVD_GROUP_SIZE`, by default a group is a host.

    What an earlier call has set is taken back first: it was for its own `init`.

    Raises:
        ValueError: an unknown `group_op`, or a `group_size` that is no positive integer.
    """
    if group_op is not None and group_op not in ops.GROUP_OPS:
        raise ValueError(f"group_op: required one of {ops.GROUP_OPS}, got {group_op!r}")
    if group_size is not None:
        check_count("group_size", group_size)
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
    for name, given in (
        ("ADASUM_HVD_GROUP_OP", group_op),
        ("ADASUM_HVD_GROUP_SIZE", group_size),
    ):
        if given is not None:
            _before[name] = os.environ.get(name)
            os.environ[name] = str(given)


def warn_of_one_group(
    settings: Mapping[str, object], rank: int, ranks: int, on_host: int
) -> None:
    """Warn, on the first rank, where groups leave nothing to AdaSum.

    Args:
        settings: the op's, after `init`.
        rank: this rank.
        ranks: ranks of the job.
        on_host: ranks on this host, the group where no size was given.
    """
    group_op, size = settings["group_op"], settings["group_size"] or on_host
    if group_op != "adasum" and 1 < ranks <= int(str(size)) and rank == 0:
        warnings.warn(
            f"AdaSum: {ranks} ranks are one group (group_size={size}), which is reduced by "
            f"{group_op}, so that AdaSum has no second group to combine; start more ranks, set "
            'a smaller group_size, or group_op="adasum"',
            stacklevel=3,
        )
