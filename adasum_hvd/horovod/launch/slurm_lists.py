"""Slurm's compressed lists: names of nodes ("node[01-12,17],login") and counts ("2(x3),1")."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST = 100_000  # numbers in a range; more is a typing error
_ITEM = re.compile(r"(?:[^,\s\[\]]|\[[^\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"([1-9]\d{0,5})(?:\(x(\d{1,6})\))?")


class ListError(ValueError):
    """A text that is not such a list."""


def items(text: str) -> list[str]:
    """Split a list at its commas and spaces, but not inside brackets.

    Example:
        >>> items("node[01-12,17],login:2")
        ['node[01-12,17]', 'login:2']
    """
    if rest := re.sub(r"[,\s]", "", _ITEM.sub("", text)):
        raise ListError(
            f"expected pairs of brackets in {text!r}, but got a single {rest[0]!r}"
        )
    return _ITEM.findall(text)


def expand(name: str) -> Iterator[str]:
    """Yield the names that a name with ranges in brackets stands for.

    Example:
        >>> list(expand("r[1-2]n[08-10,3]"))
        ['r1n08', 'r1n09', 'r1n10', 'r1n3', 'r2n08', 'r2n09', 'r2n10', 'r2n3']
    """
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < MOST:
            raise ListError(
                f"expected ranges such as [01-12,17] in {name}, but got {part!r}"
            )
        for number in range(int(first), int(last) + 1):
            for tail in expand(after):
                yield f"{before}{number:0{len(first)}d}{tail}"


def counts(text: str) -> list[int]:
    """Return the numbers of a list of counts, each repeated as often as it says.

    Example:
        >>> counts("2(x3),1")
        [2, 2, 2, 1]
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if not match:
            raise ListError(
                f"expected a number or counts such as 2(x3),1, but got {text!r}"
            )
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers
