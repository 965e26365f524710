"""Where a rank stands, as far as its environment says."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass


class LaunchError(RuntimeError):
    """The environment does not say, or the ranks do not agree, who they are."""


@dataclass(frozen=True)
class Place:
    """What an environment says of a rank; None where it does not, and the ranks find out.

    Attributes:
        scheduler: who has set the variables, for messages.
        rank: this process's number in the job.
        size: ranks in the job.
        address: rank 0's host: a name, or an IPv4 address.
        port: where a store may listen on that host; the next one is used, too.
        local_rank: this process's number on its host.
        local_size: ranks on this host.
        cross_rank: this host's number in the job.
        cross_size: hosts in the job.
    """

    scheduler: str
    rank: int
    size: int
    address: str
    port: int
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None

    def __post_init__(self) -> None:
        numbers = {"rank": (self.rank, self.size)}
        if self.local_rank is not None and self.local_size is not None:
            numbers["local rank"] = self.local_rank, self.local_size
        if self.cross_rank is not None and self.cross_size is not None:
            numbers["host"] = self.cross_rank, self.cross_size
        for what, (number, count) in numbers.items():
            if not 0 <= number < count:
                raise LaunchError(
                    f"{self.scheduler}: required a {what} below the number of them, got {what} "
                    f"{number} of {count}; look at the variables that it sets"
                )


class Variables:
    """The variables of one scheduler.

    Args:
        scheduler: whose, for messages.
        environment: all variables.
        remedy: what to do where one is missing or wrong.
    """

    def __init__(self, scheduler: str, environment: Mapping[str, str], remedy: str):
        self._scheduler, self._environment = scheduler, environment
        self._remedy = remedy

    def require(self, names: Collection[str]) -> None:
        """Raise LaunchError where some of these variables are missing."""
        missing = [name for name in names if not self._environment.get(name)]
        if missing:
            raise LaunchError(
                f"{self._scheduler}: required {', '.join(names)} in the environment, got no "
                f"{', '.join(missing)}; {self._remedy}"
            )

    def text(self, name: str) -> str:
        """Return a variable that must be there."""
        self.require([name])
        return self._environment[name]

    def number(self, name: str) -> int:
        """Return a variable that must be there and hold an integer of at least 0."""
        value = self.text(name)
        if not value.isdecimal():
            raise LaunchError(
                f"{self._scheduler}: required an integer >= 0 in {name}, got {value!r}; "
                f"{self._remedy}"
            )
        return int(value)

    def number_if_any(self, name: str) -> int | None:
        """Return the integer in a variable, None where there is none."""
        return self.number(name) if self._environment.get(name) else None

    def port(self, job: str) -> int:
        """Return MASTER_PORT, or a port made of the job's name.

        Ports above 32767 are those that Linux gives to any connection.
        """
        chosen = self.number_if_any("MASTER_PORT")
        return 20000 + zlib.crc32(job.encode()) % 6000 * 2 if chosen is None else chosen
