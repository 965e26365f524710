"""What a reduction sends: slices from rank to rank, and small tables to all.

Slices travel from and to their places in the flat buffer. Gloo's own all-gather stages every
slice (five times the time of the same bytes in point-to-point messages), and collectives that
take one tensor need slices of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist


class Communicator:
    """The ranks of a process group.

    Args:
        group: the process group; the default one if None.

    Raises:
        ValueError: this rank is not in the group.
    """

    def __init__(self, group: Any = None):
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = (
            dist.get_rank(self.group),
            dist.get_world_size(self.group),
        )
        if self.rank < 0:
            raise ValueError(
                "AdaSum: expected a process group that this rank is in, but got one that it is "
                f"not in (rank {dist.get_rank()} of {dist.get_world_size()}); call it on the "
                "group's ranks only"
            )
        self.ranks = dist.get_process_group_ranks(self.group)
        config = dist.get_backend_config(self.group)
        self._backends = dict(part.split(":") for part in config.split(","))

    @property
    def control_device(self) -> torch.device:
        """Where small tables that the program reads are gathered."""
        if "cpu" in self._backends:
            return torch.device("cpu")
        kind = next(iter(self._backends))
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def backend(self, device: torch.device) -> str:
        """Return the name of the backend that moves tensors of a device.

        Raises:
            ValueError: there is none.
        """
        if device.type not in self._backends:
            raise ValueError(
                f"AdaSum: expected tensors on {' or '.join(self._backends)}, but got some on "
                f"{device} (rank {self.rank} of {self.size}); give init_process_group() a "
                "backend for that device, such as cpu:gloo,cuda:nccl"
            )
        return self._backends[device.type]

    def timeout(self, device: torch.device) -> timedelta | None:
        """Return how long the group's collectives wait, where its backend says so."""
        backend = self.group._get_backend(device)
        return getattr(getattr(backend, "options", None), "_timeout", None)

    def scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> list[torch.Tensor]:
        """Send every rank its slice of `flat`, and return this rank's slice of all ranks'.

        Args:
            flat: one-dimensional and contiguous.
            bounds: the first element of every slice, and the end.

        Returns:
            By rank; this rank's own is a view of `flat`.
        """
        slices = [flat[a:b] for a, b in pairwise(bounds)]
        count = slices[self.rank].numel()
        received = list(flat.new_empty((self.size - 1, count)).unbind())
        received.insert(self.rank, slices[self.rank])
        self._exchange(slices, received)
        return received

    def gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        """Send this rank's slice of `flat` to all ranks, and put theirs in place."""
        slices = [flat[a:b] for a, b in pairwise(bounds)]
        mine = slices[self.rank]
        if self.backend(flat.device) != "gloo" and all(map(len, slices)):
            dist.all_gather(slices, mine, group=self.group)
        else:
            self._exchange([mine] * self.size, slices)

    def _exchange(
        self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
    ) -> None:
        """Send `out[r]` to rank r and receive `into[r]` from it, for all others at once."""
        operations = []
        for distance in range(1, self.size):
            to, of = (self.rank + distance) % self.size, self.rank - distance
            if out[to].numel():
                operations.append(self._message(dist.isend, out[to], to))
            if into[of].numel():
                operations.append(self._message(dist.irecv, into[of], of))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _message(self, operation: Any, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, self.ranks[peer], self.group)

    def all_gather(self, table: torch.Tensor) -> torch.Tensor:
        """Return [ranks, ...]: every rank's small table, all of one shape."""
        tables = table.new_empty((self.size, *table.shape))
        dist.all_gather(list(tables.unbind()), table.contiguous(), group=self.group)
        return tables

    def all_gather_object(self, thing: Any) -> list[Any]:
        """Return every rank's object, which is pickled; blocks."""
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=self.group)
        return things
