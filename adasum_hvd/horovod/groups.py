"""Groups: sets of ranks that are reduced before AdaSum runs over their results.

The native op reads its settings from the environment at every `init`, so this module turns
arguments into environment variables before Horovod starts. The op compares them over the ranks
in the first reduction of every process set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from adasum_hvd.base import ops
from adasum_hvd.base.options import check_count

_replaced: dict[str, str | None] = {}  # variables before the last `configure`


def configure(
    group_op: str | None = None,
    group_size: int | None = None,
    running: Mapping[str, object] | None = None,
) -> None:
    """Set the groups of the next `init`; None leaves a variable as it is.

    `group_op` is how the ranks of one group are reduced before AdaSum runs over the groups:
    "adasum" (all the way down, the default), "average" or "sum". `group_size` is the number of
    consecutive ranks in a group; by default a group is a host (docs/internals.md, Groups).

    Each call first restores the variables that an earlier call changed, because its arguments
    were for one `init` only. `running` has the op's settings if Horovod is initialized; then
    nothing is set.

    Raises:
        ValueError: `group_op` is unknown, or `group_size` is not a positive integer.
        RuntimeError: Horovod runs with other groups.
    """
    if group_op is not None and group_op not in ops.GROUP_OPS:
        raise ValueError(
            f"group_op: expected one of {ops.GROUP_OPS}, but got {group_op!r}"
        )
    if group_size is not None:
        check_count("group_size", group_size)
    if running is not None:
        _require_unchanged(running, {"group_op": group_op, "group_size": group_size})
        return
    for name, value in _replaced.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _replaced.clear()
    asked = {"ADASUM_HVD_GROUP_OP": group_op, "ADASUM_HVD_GROUP_SIZE": group_size}
    for name, given in asked.items():
        if given is not None:
            _replaced[name] = os.environ.get(name)
            os.environ[name] = str(given)


def _require_unchanged(
    running: Mapping[str, object], asked: Mapping[str, object]
) -> None:
    changed = {k: v for k, v in asked.items() if v is not None and v != running[k]}
    if changed:
        found = {name: running[name] for name in changed}
        raise RuntimeError(
            f"init: expected the groups of the running Horovod, {found}, but got {changed}; call "
            "shutdown() first, or pass them to the first init"
        )
