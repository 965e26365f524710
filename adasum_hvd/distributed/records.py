"""Records of reductions that a monitor has requested."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adasum_hvd.distributed.coefficients import tree_of
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.native import Rows
from adasum_hvd.distributed.observation import inputs_of, rows_of
from adasum_hvd.distributed.reduction import Solution
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.distributed.slices import layout_of
from adasum_hvd.distributed.topology import hosts_of
from adasum_hvd.monitor.statistics import TensorRecord


class Records:
    """The latest record of each bucket, by its name; of `monitor.monitor.Channel`."""

    def __init__(self) -> None:
        self._requested: set[str] = set()
        self._latest: dict[str, TensorRecord] = {}

    def requested(self, entry: str) -> bool:
        """Return whether the next reduction of a bucket is to be recorded."""
        return entry in self._requested

    def request(self, entry: str) -> None:
        """Request a record of the next reduction of a bucket."""
        self._requested.add(entry)

    def latest(self, entry: str) -> TensorRecord | None:
        """Return the latest record of a bucket, or None if there is none."""
        return self._latest.get(entry)

    def add(
        self,
        entry: str,
        solution: Solution | Rows | None,
        sizes: Sequence[int],
        communicator: Communicator,
        rule: Rule,
    ) -> None:
        """Record a reduction of a bucket if that was requested."""
        if solution is None or entry not in self._requested:
            return
        self._requested.discard(entry)
        before = self._latest.get(entry)
        number = 1 + (before.number if before else 0)
        if isinstance(solution, Solution):
            tree = tree_of(hosts_of(communicator), rule.group_op, rule.group_size)
            layout = layout_of(tuple(sizes), communicator.size)
            joined = len(inputs_of(tree))
            rows = rows_of(solution, layout, communicator.rank, tree).cpu().numpy()
            solution = Rows((joined,), rows) if joined else Rows((), np.zeros(0))
        self._latest[entry] = TensorRecord(
            number, solution.sizes, solution.rows.ravel()
        )
