"""AdaSum of one flat buffer: the steps and levels of docs/distributed.md, "How it works".

Only `Exchange` knows who holds a part of a tensor: the ranks of a level, or those of its shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain

import torch

from adasum_hvd.distributed import native
from adasum_hvd.distributed.checks import is_plain
from adasum_hvd.distributed.coefficients import Tree, constant, symmetric, tree_of, walk
from adasum_hvd.distributed.communicator import Communicator, hosts_of
from adasum_hvd.distributed.device_slice import AnySlice, slice_of
from adasum_hvd.distributed.exchange import Exchange, Shards, form_nodes, sums_by_tensor
from adasum_hvd.distributed.observation import Level, Solution, record_of
from adasum_hvd.distributed.rules import Rule, checked
from adasum_hvd.distributed.slices import layout_of
from adasum_hvd.monitor.statistics import TensorRecord
from adasum_hvd.reference import groups_of


def reduce_buffer(
    flat: torch.Tensor,
    sizes: Sequence[int],
    communicator: Communicator,
    rule: Rule,
    shards: Sequence[Shards] = (),
    at: int | None = None,
    observe: bool = False,
) -> TensorRecord | None:
    """Reduce concatenated tensors of these sizes in place; return a record if they are observed.

    Args:
        flat: one-dimensional and contiguous, of a floating dtype; the same length on all ranks.
        sizes: elements of each tensor.
        communicator: the ranks.
        rule: what becomes of the tensors.
        shards: groups over which the tensors are sharded; their ranks may hold other `sizes`,
            zero included, of the same tensors.
        at: another address of `flat`'s memory, which the ranks of a host share.
        observe: return a record, not numbered, for a monitor; not with the rule "mean".

    Collective: all ranks of the communicator; blocks on a CPU.
    """
    if communicator.size == 1 or not (shards or flat.numel()):
        return None
    if core := _core(flat, communicator, rule, shards):
        return core.reduce_flat(flat, sizes, at, observe)
    levels = levels_of(communicator, rule)
    solutions = _reduce(flat, sizes, levels, rule, shards)
    return record_of(levels, solutions) if observe else None


def levels_of(communicator: Communicator, rule: Rule) -> list[Level]:
    """Return the levels of a reduction, innermost first; collective as `hosts_of`.

    They depend on hosts and rule only, because results are rounded between them. A function of Gram
    matrices needs those of all ranks, and so has one level.
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
    several hosts. Else the first level joins the ranks of a group, the next one groups of a host,
    as far as the tree does, and the last one hosts.
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


def _reduce(
    flat: torch.Tensor,
    sizes: Sequence[int],
    levels: Sequence[Level],
    rule: Rule,
    shards: Sequence[Shards],
) -> list[Solution]:
    """Reduce a buffer in place: in the first level, and then its slice in those above."""
    (communicator, tree), *above = levels
    layout = layout_of(tuple(sizes), communicator.size)
    rows = communicator.scatter(flat, layout.bounds)
    mine = rows[communicator.rank]
    part = slice_of(rows, layout.runs[communicator.rank])
    everything = rule.function is not None
    exchange = Exchange(layout, communicator, flat.device, everything, shards)
    solutions = [_solve(part, exchange, rule, tree)]
    part.combine(tree, solutions[0].coefficients, solutions[0].scale, mine)
    if above:
        del rows, part  # memory of the other ranks' slices
        # These ranks hold the rest of a tensor. They come first, because ranks with another shard
        # may have no part of it, and need the whole sum from each rank.
        parts = (Shards(communicator, exchange.exchanged), *shards)
        own = layout.parts[communicator.rank]
        solutions += _reduce(mine, own, above, rule, parts)
    communicator.gather(flat, layout.bounds)
    return solutions


def reduce_tensors(
    tensors: Sequence[torch.Tensor],
    communicator: Communicator,
    rule: Rule,
    shards: Sequence[Shards] = (),
) -> None:
    """Reduce tensors of one dtype and device, in place; as :func:`reduce_buffer`."""
    sizes = [tensor.numel() for tensor in tensors]
    if communicator.size == 1 or not (shards or any(sizes)):
        return
    only = tensors[0]
    if core := _core(only, communicator, rule, shards):
        core.reduce_each(tensors)
        return
    in_place = len(tensors) == 1 and is_plain(only)
    flat = only.view(-1) if in_place else torch.cat([t.reshape(-1) for t in tensors])
    _reduce(flat, sizes, levels_of(communicator, rule), rule, shards)
    if in_place:  # torch has seen this rank's slice only
        torch.autograd.graph.increment_version(only)
    else:
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _core(
    tensor: torch.Tensor,
    communicator: Communicator,
    rule: Rule,
    shards: Sequence[Shards],
) -> native.Reducer | None:
    """Return what reduces tensors by the core, if these ranks have it. Collective."""
    if not (tensor.is_cpu and communicator.may_use_core):
        return None
    if rule.kind == "mean":  # a mean of parts is a part of the mean
        shards = ()
    if rule.kind == "adascale" and tensor.dtype == torch.float64:
        return None  # the core scales the matrices of float64 tensors one by one
    choice = native.choose(communicator, rule, shards)
    if not choice.groups:
        return None
    own, *others = choice.groups
    sharded = zip(others, (one.tensors for one in shards), strict=True)
    return native.Reducer(own, communicator, rule.function, [*sharded])


def _solve(part: AnySlice, exchange: Exchange, rule: Rule, tree: Tree) -> Solution:
    """Return the coefficients of all tensors in this rank's slice. Collective."""
    layout = exchange.layout
    weights = constant(tree.weights, torch.float64, part.owners.device)
    weights = weights.expand(exchange.tensors, -1)
    if rule.kind == "mean":
        return Solution(layout, torch.full_like(weights, 1 / layout.ranks))
    scale = None
    if part.dtype == torch.float64:  # whose squares overflow where it does not
        scale = power_of_two_scale(exchange.largest(part.largest(), part.owners))
    factors = None if scale is None else scale[:, None].expand_as(weights)
    sums = sums_by_tensor(part.gram(factors), part.owners, exchange.tensors)
    gram = symmetric(exchange.total(sums))
    if rule.function is not None:
        seen = gram
        if rule.kind == "adascale" and scale is not None:  # it adds tensors up
            seen = gram / scale[:, None, None].square()
        return Solution(layout, checked(rule.function(seen), gram), gram, scale)
    if set(tree.weights) != {1.0}:
        factors = weights if factors is None else weights * factors
    form = partial(form_nodes, part, exchange, tree, factors)
    return Solution(layout, walk(gram, tree, form), gram, scale)


def power_of_two_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return powers of two that bring the largest magnitudes, float64, to about 1.

    They are 1 for zero and for numbers that are not finite.
    """
    exponents = torch.frexp(largest)[1].clamp(-1021, 1021).long()
    # 2**-exponent by its bits: no function gives it exactly on every device.
    powers = (1023 - exponents << 52).view(torch.float64)
    return torch.where((largest > 0) & largest.isfinite(), powers, 1.0)
