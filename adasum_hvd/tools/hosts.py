"""The hosts of a job as other programs write them, as horovodrun's -np, -H and hostfile.

It reads an Ascend rank table (JSON), a hostfile, a list as torchrun and horovodrun have it
("node1:8,node2:8") and Slurm's compressed one ("node[01-12,17],login").
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adasum_hvd.mindspore import rank_table
from adasum_hvd.mindspore.rank_table import Host, arguments, hostfile

_ITEM = re.compile(r"(?:[^,\s\[\]]|\[[^\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
MOST = 100_000  # hosts of a list; more is a slip of the pen


class HostsError(ValueError):
    """Something that is no list of hosts; the message says which part and why."""


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
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print horovodrun's arguments and return the exit status."""
    try:
        found = read(given.hosts, given.slots)
        if given.hostfile:
            given.hostfile.write_text(hostfile(found))
    except (HostsError, rank_table.RankTableError, OSError) as error:
        print(f"adasum-hvd hosts: {error}", file=sys.stderr)
        return 1
    print(arguments(found))
    return 0


def read(what: str, slots: str = "1") -> list[Host]:
    """Return the hosts that a file or a list names, in the order of their ranks.

    Args:
        what: a path (rank table or hostfile), or a list.
        slots: ranks of each host that says none: a number, or Slurm's counts by host.

    Raises:
        HostsError: neither.
        RankTableError: a rank table that is none, or does not fit Horovod.
    """
    path = Path(what)
    if what.endswith(".json") or (path.is_file() and _is_json(path)):
        return rank_table.read(path)
    text = path.read_text() if path.is_file() else what
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
    if not listed:
        raise HostsError(f"required names of hosts, got {text!r}")
    counts = _counts(slots, len(listed))
    found = [
        Host(name, count if own is None else own)
        for (name, own), count in zip(listed, counts, strict=True)
    ]
    names = [host.name for host in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise HostsError(
            f"required each host once, got {', '.join(sorted(twice))} twice"
        )
    return found


def _of_line(line: str) -> Iterator[tuple[str, int | None]]:
    """Yield the names of a list or of a hostfile's line, and the slots that it says."""
    of_all = re.search(r"\s+slots\s*=\s*(\d+)$", line)
    if of_all:
        line = line[: of_all.start()]
    for item in _ITEM.findall(line):
        name, _, own = item.partition(":")
        if own and not re.fullmatch("[1-9][0-9]{0,5}", own):
            raise HostsError(f"required slots as a number behind {name}:, got {own!r}")
        count = int(own) if own else int(of_all[1]) if of_all else None
        for expanded in expand(name):
            if not _NAME.fullmatch(expanded):
                raise HostsError(f"required a host name or address, got {expanded!r}")
            yield expanded, count


def expand(name: str) -> list[str]:
    """Return the names that a name with ranges in brackets stands for.

    Example:
        >>> expand("r[1-2]n[08-10,3]")
        ['r1n08', 'r1n09', 'r1n10', 'r1n3', 'r2n08', 'r2n09', 'r2n10', 'r2n3']
    """
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, _, behind = rest.partition("]")
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not 0 <= int(last) - int(first) < MOST:
            raise HostsError(
                f"required ranges such as [01-12,17] in {name}, got {part!r}"
            )
        width = len(first)
        numbers += [f"{n:0{width}d}" for n in range(int(first), int(last) + 1)]
    return [before + number + tail for number in numbers for tail in expand(behind)]


def _counts(slots: str, hosts: int) -> list[int]:
    """Return the ranks of each host, of a number or of Slurm's counts by host."""
    counts: list[int] = []
    for part in slots.split(","):
        found = re.fullmatch(r"([1-9]\d{0,5})(?:\(x(\d{1,6})\))?", part)
        if not found:
            raise HostsError(
                f"slots: required a number or counts as 2(x3),1, got {slots!r}"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    if counts and len(counts) == 1:
        return counts * hosts
    if len(counts) != hosts:
        raise HostsError(
            f"slots: required one count for each of {hosts} hosts, got {slots!r}"
        )
    return counts
