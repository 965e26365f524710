"""Which ranks share a host: found out once per process group."""

from __future__ import annotations

import os
import socket
import weakref
from pathlib import Path
from typing import Any

from adasum_hvd.base.one_group import warn_of_one_group
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.rules import Rule

_hosts: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()


def hosts_of(communicator: Communicator) -> tuple[int, ...]:
    """Return for each rank the number of its host, in the order of their first ranks.

    Collective on the first call with a group; blocks then.
    """
    known = communicator.hosts or _hosts.get(communicator.group)
    if known is None:
        names = communicator.all_gather_object(_host())
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        known = _hosts[communicator.group] = tuple(numbers[name] for name in names)
    return known


def _host() -> tuple[str, str]:
    """Return what no other host has: names repeat where nobody set them, boots do not."""
    if name := os.environ.get("ADASUM_HVD_HOSTNAME"):
        return name, ""
    return socket.gethostname(), boot_id()


def boot_id() -> str:
    """Return what the kernel calls this boot, or "" if it does not say so."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else ""


def check_groups(communicator: Communicator, rule: Rule) -> None:
    """Warn if the ranks are one group, which AdaSum does not join. Collective as `hosts_of`."""
    hosts = hosts_of(communicator)
    on_host = hosts.count(hosts[communicator.rank])
    warn_of_one_group(
        rule.group_op, rule.group_size, communicator.rank, communicator.size, on_host
    )
