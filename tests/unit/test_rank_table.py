"""Rank tables: the tutorial's, and each way in which one can be wrong."""

from __future__ import annotations

import copy
import doctest
import json

import pytest

from adasum_hvd import cli
from adasum_hvd.mindspore import rank_table as hosts
from adasum_hvd.mindspore.rank_table import Host, RankTableError


def table(*names: str, per_host: int = 8) -> dict:
    """Return a table as in the tutorial, with `names` as server ids."""
    servers = [
        {
            "server_id": name,
            "device": [
                {
                    "device_id": str(device),
                    "device_ip": f"192.{device % 4 + 1}.27.{6 + server}",
                    "rank_id": str(server * per_host + device),
                }
                for device in range(per_host)
            ],
            "host_nic_ip": "reserve",
        }
        for server, name in enumerate(names)
    ]
    return {
        "version": "1.0",
        "server_count": str(len(names)),
        "server_list": servers,
        "status": "completed",
    }


def test_tutorial(tmp_path, capsys):
    path = tmp_path / "rank_table_16pcs.json"
    path.write_text(json.dumps(table("10.0.0.1", "node-2.cluster")))
    hostfile = tmp_path / "hostfile"
    assert cli.main(["hosts", str(path), "--hostfile", str(hostfile)]) == 0
    assert capsys.readouterr().out == "-np 16 -H 10.0.0.1:8,node-2.cluster:8\n"
    assert hostfile.read_text() == "10.0.0.1 slots=8\nnode-2.cluster slots=8\n"


def test_horovod_reads_it(tmp_path):
    from horovod.runner.common.util.hosts import parse_host_files, parse_hosts

    found = hosts.hosts(table("10.0.0.1", "b", per_host=2))
    assert hosts.arguments(found) == "-np 4 -H 10.0.0.1:2,b:2"
    parsed = [(h.hostname, h.slots) for h in parse_hosts("10.0.0.1:2,b:2")]
    assert parsed == [tuple(host) for host in found]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(hosts.hostfile(found))
    assert parse_host_files(str(hostfile)) == "10.0.0.1:2,b:2"


def test_order_is_by_rank():
    mixed = table("a", "b", per_host=2)
    mixed["server_list"].reverse()
    mixed["server_list"][0]["device"].reverse()
    assert hosts.hosts(mixed) == [Host("a", 2), Host("b", 2)]


def change(path: list, value) -> dict:
    """Return a table with the item at `path` replaced (deleted, for None)."""
    changed = copy.deepcopy(table("a", "b", per_host=2))
    at = changed
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed


FIRST = ["server_list", 0]
DEVICE = [*FIRST, "device", 1]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ([], "expected a JSON object"),
        (change(["version"], "0.1"), "version \"1.0\", but got '0.1'"),
        (change(["version"], None), 'version "1.0", but got None'),
        (change(["status"], "initializing"), 'status "completed"'),
        (change(["server_list"], []), "a server_list"),
        (change(["server_list"], None), "a server_list"),
        (change(["server_count"], "3"), "server_count 2, the length of server_list"),
        (change(FIRST, "a"), r"an object as server_list\[0\]"),
        (change([*FIRST, "server_id"], "10.*.*.*"), r"a host name.*got '10\.\*"),
        (change([*FIRST, "server_id"], 7), "a host name"),
        (change([*FIRST, "server_id"], "b"), "each server_id once, but got 'b twice'"),
        (change([*FIRST, "device"], []), r"a device list in server_list\[0\]"),
        (change(DEVICE, []), r"an object as server_list\[0\]\.device\[1\]"),
        (change([*DEVICE, "rank_id"], "x"), r"a number as rank_id of .*device\[1\]"),
        (change([*DEVICE, "rank_id"], "-1"), "a number as rank_id"),
        (change([*DEVICE, "rank_id"], "1" * 5000), "a number as rank_id"),
        (change([*DEVICE, "rank_id"], None), "a number as rank_id"),
        (change([*DEVICE, "rank_id"], "0"), "rank_id 0 to 3, each once"),
        (change([*DEVICE, "rank_id"], "9"), "rank_id 0 to 3, each once"),
        (change([*DEVICE, "device_id"], "0"), "each device_id once"),
    ],
)
def test_bad_tables(wrong, match):
    with pytest.raises(RankTableError, match=match):
        hosts.hosts(wrong)


def test_interleaved_ranks():
    interleaved = table("a", "b", per_host=2)
    devices = [server["device"] for server in interleaved["server_list"]]
    devices[0][1]["rank_id"], devices[1][0]["rank_id"] = "2", "1"
    with pytest.raises(RankTableError, match=r"host by host, but got '\[0, 2\] on a'"):
        hosts.hosts(interleaved)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "No such file"),
        *((b"{", "expected JSON"), (b"\xff\xfe", "expected JSON")),
        (b"{}", "expected "),
    ],
)
def test_bad_files(tmp_path, capsys, content, match):
    path = tmp_path / "table.json"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["hosts", str(path)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert match in error


def test_examples():
    assert doctest.testmod(hosts).failed == 0
