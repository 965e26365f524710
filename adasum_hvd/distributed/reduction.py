"""AdaSum of one flat buffer: the steps, in order.

1. Every rank receives its slice of all ranks' buffers (the bytes of a reduce-scatter).
2. It forms the Gram matrix of each tensor's part. Parts of a tensor that crosses slice borders
   are added up over the ranks.
3. The tree's coefficients follow from the Gram matrices.
4. It combines its slice, in place, and sends it to all ranks (an all-gather).

Each slice is computed by one rank, so that all ranks end with the same bits.

A tensor that is itself sharded over other ranks needs one sum more, because a dot product is the
sum of the shards' dot products. Only `Exchange` knows who holds a part of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from adasum_hvd.distributed import native
from adasum_hvd.distributed.coefficients import (
    Tree,
    constant,
    leaf_coefficients,
    symmetric,
    tree_of,
    walk,
)
from adasum_hvd.distributed.communicator import Communicator, hosts_of
from adasum_hvd.distributed.device_slice import AnySlice, slice_of
from adasum_hvd.distributed.exchange import Exchange, Shards, form_nodes, sums_by_tensor
from adasum_hvd.distributed.rules import Rule, checked
from adasum_hvd.distributed.slices import Layout, layout_of
from adasum_hvd.monitor.statistics import TensorRecord
from adasum_hvd.reference import groups_of


class Solution(NamedTuple):
    """The coefficients of a reduction, and the numbers that they follow from."""

    coefficients: torch.Tensor  # float64 [tensors, ranks]
    gram: torch.Tensor | None = None  # float64 [tensors, N, N], of the scaled vectors
    scale: torch.Tensor | None = None  # float64 [tensors], powers of two


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
    layout = layout_of(tuple(sizes), communicator.size)
    rows = communicator.scatter(flat, layout.bounds)
    part = slice_of(rows, layout.runs[communicator.rank])
    hosts, rank = hosts_of(communicator), communicator.rank
    tree = tree_of(hosts, rule.group_op, rule.group_size)
    solution = _solve(part, layout, communicator, rule, tree, shards)
    part.combine(tree, solution.coefficients, solution.scale, rows[rank])
    communicator.gather(flat, layout.bounds)
    if not observe:
        return None
    return _record_of(solution, layout, rank, tree.weights, _inputs_of(hosts, rule))


def reduce_tensors(
    tensors: Sequence[torch.Tensor],
    communicator: Communicator,
    rule: Rule,
    shards: Sequence[Shards] = (),
) -> None:
    """Reduce tensors of one dtype and device, in place; as :func:`reduce_buffer`."""
    sizes = [tensor.numel() for tensor in tensors]
    only = tensors[0]
    some = communicator.size > 1 and (shards or any(sizes))
    if some and (core := _core(only, communicator, rule, shards)):
        core.reduce_each(tensors)
        return
    if len(tensors) == 1 and only.is_contiguous() and not only.is_neg():
        reduce_buffer(only.view(-1), sizes, communicator, rule, shards)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    reduce_buffer(flat, sizes, communicator, rule, shards)
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
    if choice.group is None:
        return None
    sharded = zip(choice.shards, (one.tensors for one in shards), strict=True)
    return native.Reducer(choice.group, communicator, rule.function, [*sharded])


def _solve(
    part: AnySlice,
    layout: Layout,
    communicator: Communicator,
    rule: Rule,
    tree: Tree,
    shards: Sequence[Shards],
) -> Solution:
    """Return the coefficients of all tensors in this rank's slice. Collective."""
    device, tensors = part.owners.device, len(layout.sizes)
    weights = constant(tree.weights, torch.float64, device).expand(tensors, -1)
    if rule.kind == "mean":
        return Solution(torch.full_like(weights, 1 / communicator.size))
    everything = rule.function is not None
    exchange = Exchange(layout, communicator, device, everything, shards)
    scale = None
    if part.dtype == torch.float64:  # whose squares overflow where it does not
        scale = power_of_two_scale(exchange.largest(part.largest(), part.owners))
    factors = None if scale is None else scale[:, None].expand_as(weights)
    sums = sums_by_tensor(part.gram(factors), part.owners, tensors)
    gram = symmetric(exchange.total(sums))
    if rule.function is not None:
        seen = gram
        if rule.kind == "adascale" and scale is not None:  # it adds tensors up
            seen = gram / scale[:, None, None].square()
        return Solution(checked(rule.function(seen), gram), gram, scale)
    if set(tree.weights) != {1.0}:
        factors = weights if factors is None else weights * factors
    sides = walk(gram, tree, partial(form_nodes, part, exchange, tree, factors))
    return Solution(leaf_coefficients(sides, tree, tensors), gram, scale)


def power_of_two_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return powers of two that bring the largest magnitudes, float64, to about 1.

    They are 1 for zero and for numbers that are not finite.
    """
    exponents = torch.frexp(largest)[1].clamp(-1021, 1021).long()
    # 2**-exponent by its bits: no function gives it exactly on every device.
    powers = (1023 - exponents << 52).view(torch.float64)
    return torch.where((largest > 0) & largest.isfinite(), powers, 1.0)


def _inputs_of(hosts: Sequence[int], rule: Rule) -> list[list[int]]:
    """Return the ranks of each vector that AdaSum joins; none if there is one group only."""
    if rule.group_op == "adasum":
        return [[rank] for rank in range(len(hosts))]
    groups = groups_of(hosts, rule.group_size)
    return groups if len(groups) > 1 else []


def _record_of(
    solution: Solution,
    layout: Layout,
    rank: int,
    weights: Sequence[float],
    inputs: Sequence[Sequence[int]],
) -> TensorRecord:
    """Return a record of 5 + inputs numbers; none without inputs, of one group that is added up.

    Rows of tensors whose first element is in another rank's slice are zero. The ranks' vectors are
    multiplied by their weights.
    """
    gram = solution.gram
    assert gram is not None
    tensors, ranks = gram.shape[:2]
    if not inputs:
        return TensorRecord(0, (), np.zeros(0))
    by_rank = gram.new_tensor(weights)
    by_input = gram.new_zeros((len(inputs), ranks))
    for number, members in enumerate(inputs):
        by_input[number, members] = by_rank[members]
    first = [members[0] for members in inputs]
    coefficients = solution.coefficients[:, first] / by_rank[first]
    products = by_input @ gram @ by_input.T
    squares = products.diagonal(dim1=1, dim2=2)
    norms = squares.clamp_min(0).sqrt()
    i, j = torch.triu_indices(len(inputs), len(inputs), 1, device=gram.device)
    scales = norms[:, i] * norms[:, j]
    cosines = torch.where(scales > 0, products[:, i, j] / scales, 0.0)
    result = (coefficients[:, None] @ products @ coefficients[..., None]).flatten()
    inverse = 1.0 if solution.scale is None else 1.0 / solution.scale
    columns = [
        cosines.sum(1),
        (scales > 0).sum(1).double(),
        squares.sum(1).clamp_min(0).sqrt() * inverse,
        products.sum((1, 2)).clamp_min(0).sqrt() / len(inputs) * inverse,
        result.clamp_min(0).sqrt() * inverse,
    ]
    rows = torch.cat([torch.stack(columns, 1), coefficients], 1)
    mine = torch.zeros(tensors, 1, dtype=torch.bool, device=gram.device)
    mine[[*set(layout.held[rank]).difference(*layout.held[:rank])]] = True
    found = torch.where(mine, rows, 0.0).cpu().numpy()
    return TensorRecord(0, (len(inputs),), found.ravel())
