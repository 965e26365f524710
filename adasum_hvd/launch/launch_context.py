"""The place of a process in its job, as far as its environment describes it."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass


class LaunchError(RuntimeError):
    """The environment does not describe the job, or the ranks contradict one another."""


@dataclass(frozen=True)
class LaunchContext:
    """The description of a rank by its environment; the ranks find out what is None.

    Attributes:
        scheduler: the launcher that set the variables, for messages.
        rank: this process's number in the job.
        size: ranks in the job.
        address: rank 0's host: a name, or an IPv4 address.
        port: of a store on that host; the next port is used, too.
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
                    f"{self.scheduler}: expected a {what} from 0 to {count - 1}, but got {what} "
                    f"{number} of {count}; check the variables that it sets"
                )


class Variables:
    """The variables of one scheduler.

    Args:
        scheduler: its name, for messages.
        environment: all variables.
        remedy: what the user should do if one is missing or wrong.
    """

    def __init__(self, scheduler: str, environment: Mapping[str, str], remedy: str):
        self._scheduler, self._environment = scheduler, environment
        self._remedy = remedy

    def require(self, names: Collection[str]) -> None:
        """Raise LaunchError if one of these variables is missing."""
        missing = [name for name in names if not self._environment.get(name)]
        if missing:
            raise LaunchError(
                f"{self._scheduler}: expected {', '.join(names)} in the environment, but got "
                f"no {', '.join(missing)}; {self._remedy}"
            )

    def text(self, name: str) -> str:
        """Return a required variable."""
        self.require([name])
        return self._environment[name]

    def number(self, name: str) -> int:
        """Return a required variable that holds an integer >= 0."""
        value = self.text(name)
        if not value.isdecimal():
            raise LaunchError(
                f"{self._scheduler}: expected an integer >= 0 in {name}, but got {value!r}; "
                f"{self._remedy}"
            )
        return int(value)

    def number_if_any(self, name: str) -> int | None:
        """Return the integer in a variable, None if it is not set."""
        return self.number(name) if self._environment.get(name) else None

    def port(self, job: str) -> int:
        """Return MASTER_PORT, else a port computed from the job's name.

        It is below 32768, where Linux begins to give ports to outgoing connections.
        """
        chosen = self.number_if_any("MASTER_PORT")
        return 20000 + zlib.crc32(job.encode()) % 6000 * 2 if chosen is None else chosen
