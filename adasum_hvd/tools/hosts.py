"""`adasum-hvd hosts`: from other programs' lists of hosts to horovodrun's -np, -H and hostfile."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from adasum_hvd.horovod.launch import slurm_lists
from adasum_hvd.horovod.launch.slurm_lists import MOST, ListError
from adasum_hvd.mindspore import rank_table
from adasum_hvd.mindspore.rank_table import HOST_NAME, Host, arguments, hostfile


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "hosts",
        help="turn a rank table, a hostfile or a Slurm node list into horovodrun's -np and -H",
    )
    parser.add_argument(
        "hosts", help="a file, or a list such as node[01-04] or node1:8,node2:8"
    )
    parser.add_argument(
        "--slots", default="1", metavar="N", help="ranks of a host, or Slurm's 2(x3),1"
    )
    parser.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="also write a hostfile"
    )
    errors = ListError, rank_table.RankTableError, OSError, UnicodeError
    parser.set_defaults(run=run, errors=errors)


def run(given: argparse.Namespace) -> None:
    """Print horovodrun's arguments."""
    found = read(given.hosts, given.slots)
    if given.hostfile:
        given.hostfile.write_text(hostfile(found))
    print(arguments(found))


def read(what: str, slots: str = "1") -> list[Host]:
    """Return the hosts that a file or a list names, in the order of their ranks.

    `slots` has the ranks of hosts without a number: one number, or Slurm's counts by host.
    """
    path = Path(what)
    if what.endswith(".json") or (path.is_file() and _is_json(path)):
        return rank_table.read(path)
    is_file = path.is_file() or path.suffix == ".txt" or path.name == "hostfile"
    text = path.read_text() if is_file else what
    return parse(text, slots)


def _is_json(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(256).lstrip()[:1] in (b"{", b"[")


def parse(text: str, slots: str = "1") -> list[Host]:
    """Return the hosts of a list or of a hostfile's text; as :func:`read`.

    Example:
        >>> parse("node[09-10],login:2", slots="4")
        [Host(name='node09', slots=4), Host(name='node10', slots=4), Host(name='login', slots=2)]
        >>> parse("a,b,c", slots="2(x2),1")[-1]
        Host(name='c', slots=1)
    """
    listed: list[tuple[str, int | None]] = []
    for line in text.splitlines():
        listed += _of_line(line.partition("#")[0].strip())
        if len(listed) > MOST:
            raise ListError(
                f"expected at most {MOST} hosts, but got more in {line[:60]!r}"
            )
    if not listed:
        raise ListError(f"expected names of hosts, but got {text!r}")
    counts = _counts(slots, len(listed))
    found = [
        Host(name, count if own is None else own)
        for (name, own), count in zip(listed, counts, strict=True)
    ]
    names = [host.name for host in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ListError(
            f"expected each host once, as 'a slots=2' or 'a:2', but got "
            f"{', '.join(sorted(twice))} twice; a node file of PBS has a line for each rank: "
            "count them with sort FILE | uniq -c"
        )
    return found


def _of_line(line: str) -> Iterator[tuple[str, int | None]]:
    """Yield each name in a list or a hostfile's line, and its slots if given."""
    names, *of_all = re.split(r"\s+slots\s*=\s*(\S*)$", line)
    for item in slurm_lists.items(names):
        name, _, own = item.partition(":")
        given = own or (of_all[0] if of_all else None)
        if given is not None and not re.fullmatch("[1-9][0-9]{0,5}", given):
            raise ListError(
                f"expected a number of slots of {name}, at least 1, but got {given!r}"
            )
        count = None if given is None else int(given)
        for expanded in islice(slurm_lists.expand(name), MOST + 1):
            if not HOST_NAME.fullmatch(expanded):
                raise ListError(
                    f"expected a host name or address, and no more than slots=N after it, but "
                    f"got {expanded!r} in {line[:60]!r}"
                )
            yield expanded, count


def _counts(slots: str, hosts: int) -> list[int]:
    """Return the ranks of each host, from one number or Slurm's counts by host."""
    counts = slurm_lists.counts(slots)
    if len(counts) == 1:
        return counts * hosts
    if len(counts) != hosts:
        raise ListError(
            f"slots: expected one count for each of {hosts} hosts, but got {slots!r}"
        )
    return counts
