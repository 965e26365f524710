"""Conversion of an Ascend rank table to Horovod's `-H` and hostfile.

The example is `rank_table_16pcs.json` of MindSpore 1.7's AdaSum tutorial: docs/mindspore.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")


class RankTableError(ValueError):
    """A rank table that cannot be converted to hosts."""


class Host(NamedTuple):
    """A host's name or address, and the ranks it runs."""

    name: str
    slots: int


def read(path: Path) -> list[Host]:
    """Return the hosts of a rank table file, in the order of their ranks.

    Raises:
        RankTableError: the file is missing, not JSON, or not a complete table of version 1.0
            whose servers have consecutive ranks.
    """
    try:
        return hosts(json.loads(path.read_text()))
    except RankTableError as error:
        raise RankTableError(f"{path}: {error}") from None
    except OSError as error:
        raise RankTableError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # JSON, UTF-8
        raise RankTableError(f"{path}: expected JSON, but got {error}") from error


def hosts(table: Any) -> list[Host]:
    """Return the hosts of a parsed rank table; as :func:`read`.

    Example:
        >>> hosts({"version": "1.0", "server_count": "1", "status": "completed",
        ...        "server_list": [{"server_id": "10.0.0.1",
        ...                         "device": [{"device_id": "0", "rank_id": "0"}]}]})
        [Host(name='10.0.0.1', slots=1)]
    """
    _require(isinstance(table, dict), "a JSON object", table)
    for key, value in (("version", "1.0"), ("status", "completed")):
        _require(table.get(key) == value, f'{key} "{value}"', table.get(key))
    servers = _list(table, "server_list", "a server_list")
    count, length = table.get("server_count"), len(servers)
    expected = f"server_count {length}, the length of server_list"
    _require(str(count) == str(length), expected, count)
    ranks_of: dict[str, list[int]] = {}
    for position, server in enumerate(servers):
        name, ranks = _server(server, f"server_list[{position}]")
        _require(name not in ranks_of, "each server_id once", f"{name} twice")
        ranks_of[name] = ranks
    found = sorted(rank for ranks in ranks_of.values() for rank in ranks)
    each_once = f"rank_id 0 to {len(found) - 1}, each once"
    _require(found == list(range(len(found))), each_once, found)
    for name, ranks in ranks_of.items():
        _require(
            ranks[-1] - ranks[0] == len(ranks) - 1,
            "consecutive rank_id on each server, as Horovod numbers ranks host by host",
            f"{ranks} on {name}",
        )
    in_order = sorted(ranks_of.items(), key=lambda pair: pair[1])
    return [Host(name, len(ranks)) for name, ranks in in_order]


def _server(server: Any, where: str) -> tuple[str, list[int]]:
    """Return a server's name and its ranks in order."""
    _require(isinstance(server, dict), f"an object as {where}", server)
    name = server.get("server_id")
    is_name = isinstance(name, str) and HOST_NAME.fullmatch(name)
    _require(is_name, f"a host name or IPv4 address as server_id of {where}", name)
    devices = _list(server, "device", f"a device list in {where}")
    ids, ranks = (
        [
            _number(device, key, f"{where}.device[{position}]")
            for position, device in enumerate(devices)
        ]
        for key in ("device_id", "rank_id")
    )
    _require(len({*ids}) == len(ids), f"each device_id once in {where}", ids)
    return name, sorted(ranks)


def _list(holder: dict[str, Any], key: str, expected: str) -> list[Any]:
    value: Any = holder.get(key)
    _require(isinstance(value, list) and value, expected, value)
    return list(value)


def _number(device: Any, key: str, where: str) -> int:
    _require(isinstance(device, dict), f"an object as {where}", device)
    text = device.get(key)
    is_number = isinstance(text, int | str) and not isinstance(text, bool)
    is_short = is_number and re.fullmatch("[0-9]{1,9}", str(text))
    _require(is_short, f"a number as {key} of {where}", text)
    return int(text)


def _require(condition: Any, expected: str, actual: Any) -> None:
    if not condition:
        raise RankTableError(f"rank table: expected {expected}, but got {actual!r}")


def arguments(found: list[Host]) -> str:
    """Return `-np` and `-H` for horovodrun."""
    ranks = sum(host.slots for host in found)
    return f"-np {ranks} -H {','.join(f'{h.name}:{h.slots}' for h in found)}"


def hostfile(found: list[Host]) -> str:
    """Return the text of a hostfile for `horovodrun --hostfile`."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in found)
