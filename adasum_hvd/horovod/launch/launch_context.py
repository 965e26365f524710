"""The place of a process in its job, as far as its environment describes it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_PORT, _PORTS, _TRIED = 20000, 12000, 10


class LaunchError(RuntimeError):
    """The environment does not describe the job, or the ranks contradict one another."""


@dataclass(frozen=True)
class LaunchContext:
    """The description of a rank by its environment; the ranks find out what is None."""

    scheduler: str  # the launcher that set the variables, for messages
    rank: int
    size: int
    address: str  # rank 0's host: a name, or an IPv4 address
    port: int | None = None  # MASTER_PORT, of torch's store on that host
    job: str = ""  # a name that no other job has
    local_rank: int | None = None  # on this host
    local_size: int | None = None
    cross_rank: int | None = None  # this host's number
    cross_size: int | None = None  # hosts

    def __post_init__(self) -> None:
        numbers = {"rank": (self.rank, self.size)}
        if self.local_rank is not None and self.local_size is not None:
            numbers["local rank"] = self.local_rank, self.local_size
        if self.cross_rank is not None and self.cross_size is not None:
            numbers["host"] = self.cross_rank, self.cross_size
        for what, (number, count) in numbers.items():
            if not 0 <= number < count:
                raise LaunchError(
                    f"{self.scheduler}: expected a {what} from 0 to {count - 1}, but got {what} "
                    f"{number} of {count}; check the variables that it sets"
                )

    @property
    def ports(self) -> Sequence[int]:
        """The ports that rank 0 tries for a store without torch, in this order.

        They are below 32768, where Linux begins to give ports to outgoing connections. Only a
        store that knows the job's name can be found on another port than the first one.
        """
        if self.port is not None:
            return [self.port + 1]
        name = self.job or self.address
        first = _FIRST_PORT + zlib.crc32(name.encode()) % _PORTS
        return range(first, first + (_TRIED if self.job else 1))
