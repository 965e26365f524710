"""The division of parameters into buckets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Name = TypeVar("Name")
Named = tuple[Name, Any]


def partition(
    named: Iterable[Named[Name]],
    describe: Callable[[Any], tuple[Hashable, int]],
    bucket_bytes: int,
    groups: int | Sequence[Sequence[Any]] | None = None,
) -> list[list[Named[Name]]]:
    """Divide parameters into lists that each fit one bucket, in reverse order of forward.

    Args:
        named: (name, parameter) of all parameters to reduce.
        describe: returns a parameter's kind (wire dtype, device) and its bytes on the wire; all
            parameters of a list have one kind.
        bucket_bytes: a list is closed before it exceeds this many bytes.
        groups: as Horovod's: a number of groups, or lists of parameters that stay together.
    """
    chosen = _chosen_groups(list(named), groups)
    result: list[list[Named[Name]]] = []
    for members, limit in chosen:
        open_lists: dict[Hashable, tuple[list[Named[Name]], int]] = {}
        for name, parameter in reversed(members):
            kind, size = describe(parameter)
            current, filled = open_lists.get(kind, ([], 0))
            if current and limit and filled + size > bucket_bytes:
                result.append(current)
                current, filled = [], 0
            current.append((name, parameter))
            open_lists[kind] = (current, filled + size)
        result.extend(current for current, _ in open_lists.values())
    return result


def _chosen_groups(
    named: list[Named[Name]], groups: int | Sequence[Sequence[Any]] | None
) -> list[tuple[list[Named[Name]], bool]]:
    """Return (parameters, whether the byte limit applies) for each of the caller's groups."""
    if groups is None:
        return [(named, True)]
    if isinstance(groups, int):
        per_group = -(-len(named) // groups) if groups else len(named)
        cuts = range(0, len(named), max(per_group, 1))
        return [(named[cut : cut + per_group], groups == 0) for cut in cuts]
    group_of = {id(p): index for index, group in enumerate(groups) for p in group}
    members: list[list[Named[Name]]] = [[] for _ in groups]
    rest: list[Named[Name]] = []
    for name, parameter in named:
        index = group_of.get(id(parameter))
        (rest if index is None else members[index]).append((name, parameter))
    return [(group, False) for group in members if group] + [(rest, True)]
