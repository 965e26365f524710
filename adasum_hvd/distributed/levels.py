"""The levels of a reduction over several hosts.

First the ranks of a group reduce, then the ranks with the same slice in all groups. So the ranks of
a host together send each element to the other hosts once, not once each.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from adasum_hvd.distributed.coefficients import Tree, tree_of
from adasum_hvd.distributed.communicator import Communicator, hosts_of
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.reference import groups_of


class Level(NamedTuple):
    """The ranks that this rank reduces with, and the tree over them."""

    communicator: Communicator
    tree: Tree


def levels_of(communicator: Communicator, rule: Rule) -> list[Level]:
    """Return the levels of a reduction, innermost first; collective as `hosts_of`.

    Results are rounded between levels, so that levels depend on hosts and rule only: buckets must
    not change a bit. A function of Gram matrices needs those of all ranks, and so has one level.
    """
    hosts, op, size = hosts_of(communicator), rule.group_op, rule.group_size
    order, radices = plan(hosts, size)
    if rule.function is not None or len(radices) == 1:
        return [Level(communicator, tree_of(hosts, op, size))]
    levels, place, stride = [], order.index(communicator.rank), 1
    for radix in radices:
        first = place - place // stride % radix * stride
        members = order[first : first + radix * stride : stride]
        tree = tree_of((0,) * radix, op, 0)
        levels.append(Level(communicator.among(members), tree))
        op, stride = "adasum", radix * stride
    return levels


@lru_cache(maxsize=256)
def plan(
    hosts: tuple[int, ...], group_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks in the order of the tree, and the number of ranks in each level.

    That is one level if there is one host, or if groups have one rank, different sizes or ranks of
    several hosts. Else the first level joins the ranks of a group, and the last one hosts. If
    groups are smaller than hosts, a level between them joins a host's groups, as far as the tree
    does.
    """
    groups = groups_of(hosts, group_size)
    order, size = tuple(chain(*groups)), len(groups[0])

    def on_one_host(ranks: int) -> bool:
        blocks = (order[k : k + ranks] for k in range(0, len(order), ranks))
        return all(len({hosts[rank] for rank in block}) == 1 for block in blocks)

    one_level = size == 1 or len(set(hosts)) == 1 or {*map(len, groups)} != {size}
    if one_level or not on_one_host(size):
        return order, (len(hosts),)
    ranks = size
    while len(hosts) % (2 * ranks) == 0 and on_one_host(2 * ranks):
        ranks *= 2
    radices = size, ranks // size, len(hosts) // ranks
    return order, tuple(radix for radix in radices if radix > 1)
