"""Records of reductions that a monitor has requested."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adasum_hvd.common.binding import TensorRecord
from adasum_hvd.distributed.coefficients import tree_of
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.observation import inputs_of, rows_of
from adasum_hvd.distributed.reduction import Solution
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.distributed.slices import layout_of
from adasum_hvd.distributed.topology import hosts_of


class Records:
    """The latest record of each bucket, by its name; of `monitor.monitor.Channel`."""

    def __init__(self) -> None:
        self._requested: set[str] = set()
        self._latest: dict[str, TensorRecord] = {}

    def request(self, entry: str) -> None:
        """Request a record of the next reduction of a bucket."""
        self._requested.add(entry)

    def latest(self, entry: str) -> TensorRecord | None:
        """Return the latest record of a bucket, or None if there is none."""
        return self._latest.get(entry)

    def add(
        self,
        entry: str,
        solution: Solution | None,
        sizes: Sequence[int],
        communicator: Communicator,
        rule: Rule,
    ) -> None:
        """Record a reduction of a bucket if that was requested."""
        if solution is None or entry not in self._requested:
            return
        self._requested.discard(entry)
        tree = tree_of(hosts_of(communicator), rule.group_op, rule.group_size)
        layout = layout_of(tuple(sizes), communicator.size)
        joined = len(inputs_of(tree))
        rows = rows_of(solution, layout, communicator.rank, tree)
        before = self._latest.get(entry)
        self._latest[entry] = TensorRecord(
            1 + (before.number if before else 0),
            (joined,) if joined else (),
            rows.flatten().cpu().numpy() if joined else np.zeros(0),
        )
