"""The route from this host to rank 0's: addresses and the network interface."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

import psutil

from adasum_hvd.horovod.launch.launch_context import LaunchError

_RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Route:
    """A route to rank 0's host: the IPv4 addresses of its end and of its start."""

    to: str
    source: str

    @property
    def stays(self) -> bool:
        """Whether the route stays on this host."""
        return self.source.startswith("127.") or self.source == self.to


def find(address: str, timeout_seconds: float) -> Route:
    """Return the route to a host; wait for its name, which a new pod gets late."""
    limit = time.monotonic() + timeout_seconds
    while True:
        try:
            to = socket.getaddrinfo(address, None, socket.AF_INET)[0][4][0]
            return Route(str(to), source_to(str(to)))
        except OSError as error:
            if time.monotonic() > limit:
                raise LaunchError(
                    f"MASTER_ADDR: expected a host with an IPv4 address that can be reached, "
                    f"but got {address!r} ({error}) for {timeout_seconds:g} seconds; set it to a "
                    "name or an address of rank 0's host"
                ) from error
        time.sleep(_RETRY_SECONDS)


def source_to(address: str) -> str:
    """Return this host's own address on the route to another host. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def interface_with(address: str) -> str:
    """Return the name of the network interface that has an IPv4 address."""
    found = psutil.net_if_addrs()
    for name, addresses in found.items():
        if any(entry.address == address for entry in addresses):
            return name
    raise LaunchError(
        f"HOROVOD_GLOO_IFACE: expected an interface with address {address}, which the route to "
        f"rank 0 takes, but got {', '.join(found)} without it; set the variable to the interface "
        "that reaches the other hosts"
    )
