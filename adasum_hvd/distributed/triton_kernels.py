"""Kernels of one pass over all ranks' rows of a slice; a program works on one block.

The order of additions is part of the definition, and not that of `tl.sum`, which depends on the
number of warps. So a block has the same bits in every buffer, at every address, and in Triton's
interpreter:

- element e of a block belongs to lane `e // width % LANES`, where `width` elements are 16 bytes;
- a lane adds up its elements, `LANES * width` after `LANES * width`, and among `width` neighbours
  those at even places first (0, 4, 2, 6, 1, 5, 3, 7);
- the sums of neighbouring lanes are added, then neighbours of those, and so on.

Multiply-adds are fused by name only, where the product is exact anyway: of types of up to four
bytes in float64.

What kernels have in common: `rows` has a pointer for each rank, to elements of `width` in 16 bytes;
`aligned` says whether all of them, and the result, are aligned to 16 bytes. `starts` (int64) and
`counts` (int32) are a block's elements, and `owners` (int64) its tensor. If a kernel is `scaled`,
it multiplies rows by `factors`, float64 [tensors, rows]. `out`, float64 [blocks, columns], points
to the first column to write.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adasum_hvd.distributed.slices import BLOCK_ELEMENTS

BLOCK = tl.constexpr(BLOCK_ELEMENTS)
HALVINGS = tl.constexpr(7)
LANES = tl.constexpr(2**7)
ADD = tl.constexpr(-1)  # in a program, which `device_slice.program` writes
# What may differ from call to call without another compilation.
VARYING = ["aligned", "columns", "stride"]
POINTERS = ["rows", "result", "starts", "counts", "owners", "factors", "out"]
POINTERS += ["cancelled", "sides", "scale"]


@triton.jit
def _load(row, start, at, count, full: tl.constexpr):
    """Return the elements of a row at these places of a block, zeros from `count` on."""
    if full:
        x = tl.load(tl.multiple_of(row + start, 16) + at)
    else:
        x = tl.load(row + start + at, mask=at < count, other=0.0)
    return x


@triton.jit
def _lanes(x, width: tl.constexpr):
    """Return `width` tensors [LANES] of the neighbours in [LANES * width]."""
    parts = (x,)
    for _ in tl.static_range((width > 1) + (width > 2) + (width > 4)):
        halves = ()
        for k in tl.static_range(len(parts)):
            pairs = tl.reshape(parts[k], [parts[k].shape[0] // 2, 2])
            even, odd = tl.split(pairs)
            halves = halves + (even, odd)
        parts = halves
    return parts


@triton.jit
def _store_sums(sums, to):
    """Store the sum of each of these [LANES], four at a time."""
    number: tl.constexpr = len(sums)
    for _ in tl.static_range(-number % 4):
        sums = sums + (sums[0],)
    for first in tl.static_range(0, number, 4):
        even = tl.join(sums[first], sums[first + 2])
        odd = tl.join(sums[first + 1], sums[first + 3])
        four = tl.reshape(tl.join(even, odd), [LANES, 4])
        for _ in tl.static_range(HALVINGS):  # a sum of two has one order
            four = tl.sum(tl.reshape(four, [four.shape[0] // 2, 2, 4]), 1)
        four = tl.reshape(four, [4])
        place = first + tl.arange(0, 4)
        tl.store(to + place, four, mask=place < number)


@triton.jit
def _gram_of_block(
    rows, start, count, out, factors,
    lefts: tl.constexpr, width: tl.constexpr, scaled: tl.constexpr, full: tl.constexpr,
):  # fmt: skip
    ranks: tl.constexpr = len(rows)
    exact: tl.constexpr = width > 2
    pairs: tl.constexpr = lefts * (ranks - lefts) if lefts else ranks * (ranks + 1) // 2
    sums = ()
    for _ in tl.static_range(pairs):
        sums = sums + (tl.zeros([LANES], tl.float64),)
    for first in range(0, BLOCK, LANES * width):
        at = first + tl.arange(0, LANES * width)
        values = ()
        for i in tl.static_range(ranks):
            values = values + (_lanes(_load(rows[i], start, at, count, full), width),)
        for part in tl.static_range(width):
            x = ()
            for i in tl.static_range(ranks):
                own = values[i][part].to(tl.float64)
                if scaled:
                    own *= tl.load(factors + i)
                x = x + (own,)
            added = ()
            for i in tl.static_range(lefts if lefts else ranks):
                for j in tl.static_range(lefts if lefts else i, ranks):
                    if exact:
                        both = tl.fma(x[i], x[j], sums[len(added)])
                    else:
                        both = sums[len(added)] + x[i] * x[j]
                    added = added + (both,)
            sums = added
    _store_sums(sums, out)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def gram_kernel(
    rows, starts, counts, owners, factors, out, columns, aligned,
    lefts: tl.constexpr, width: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """Store a block's dot products of the first `lefts` rows with the others.

    If `lefts` is 0, those of all pairs: the upper triangle, row by row.
    """
    block = tl.program_id(0).to(tl.int64)
    start, count = tl.load(starts + block), tl.load(counts + block)
    out += block * columns
    factors += tl.load(owners + block) * len(rows)
    if (aligned != 0) & (count == BLOCK) & (start % width == 0):
        _gram_of_block(rows, start, count, out, factors, lefts, width, scaled, True)
    else:
        _gram_of_block(rows, start, count, out, factors, lefts, width, scaled, False)


@triton.jit
def _evaluate(
    rows, start, at, count, factors, sides,
    program: tl.constexpr, scaled: tl.constexpr, full: tl.constexpr,
):  # fmt: skip
    """Return the float64 that a program gives: see `device_slice.program`."""
    stack = ()
    for k in tl.static_range(len(program)):
        if program[k] >= 0:
            x = _load(rows[program[k]], start, at, count, full).to(tl.float64)
            if scaled:
                x *= tl.load(factors + program[k])
            stack = stack + (x,)
        elif program[k] == ADD:
            stack = stack[:-2] + (stack[-2] + stack[-1],)
        else:
            left = stack[-2] * tl.load(sides + (ADD - 1 - program[k]))
            right = stack[-1] * tl.load(sides + (ADD - program[k]))
            stack = stack[:-2] + (left + right,)
    return stack[0]


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def nodes_kernel(
    rows, starts, counts, owners, cancelled, factors, sides, out, columns, stride,
    left: tl.constexpr, right: tl.constexpr, width: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """Store `left.left`, `left.right` and `right.right` of two nodes, where a tensor needs them.

    Those are the tensors with `cancelled`, int8 [tensors]. `left` and `right` are the nodes'
    programs, which multiply by `sides`, float64 [tensors, stride].
    """
    block = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + block)
    if tl.load(cancelled + owner) != 0:
        start, count = tl.load(starts + block), tl.load(counts + block)
        factors += owner * len(rows)
        sides += owner * stride
        zeros = tl.zeros([LANES], tl.float64)
        sums = (zeros, zeros, zeros)
        for first in range(0, BLOCK, LANES * width):
            at = first + tl.arange(0, LANES * width)
            a = _evaluate(rows, start, at, count, factors, sides, left, scaled, False)
            b = _evaluate(rows, start, at, count, factors, sides, right, scaled, False)
            lefts, rights = _lanes(a, width), _lanes(b, width)
            for part in tl.static_range(width):
                x, y = lefts[part], rights[part]
                sums = (sums[0] + x * x, sums[1] + x * y, sums[2] + y * y)
        _store_sums(sums, out + block * columns)


@triton.jit
def _rounded(x, kind: tl.constexpr):
    """Return float64 rounded once; to two bytes by way of a float32 that is rounded to odd."""
    if kind != tl.float64:
        near = x.to(tl.float32)
        if kind != tl.float32:
            bits, back = near.to(tl.int32, bitcast=True), near.to(tl.float64)
            to_odd = tl.where(tl.abs(x) > tl.abs(back), 1, -1)
            inexact = (back != x) & (x == x) & (bits % 2 == 0)
            bits += tl.where(inexact, to_odd, 0)
            if kind == tl.bfloat16:  # by hand: Triton's interpreter cuts bits off
                nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000
                bits = tl.where(x == x, nearest, bits)
            near = bits.to(tl.float32, bitcast=True)
        x = near.to(kind)
    return x


@triton.jit
def _combine_block(
    rows, result, start, count, factors, scale,
    program: tl.constexpr, tile: tl.constexpr, scaled: tl.constexpr, full: tl.constexpr,
):  # fmt: skip
    for first in range(0, BLOCK, tile):
        at = first + tl.arange(0, tile)
        x = _evaluate(rows, start, at, count, factors, factors, program, True, full)
        if scaled:
            x /= tl.load(scale)
        x = _rounded(x, result.dtype.element_ty)
        if full:
            tl.store(tl.multiple_of(result + start, 16) + at, x)
        else:
            tl.store(result + start + at, x, mask=at < count)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def combine_kernel(
    rows, result, starts, counts, owners, factors, scale, aligned,
    program: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """Store the sum of a block's rows times their factors, in the order of the root's program.

    `result` may be one of the rows; `tile` elements are worked on together. If `scaled`, sums are
    divided by `scale`, float64 [tensors].
    """
    block = tl.program_id(0).to(tl.int64)
    start, count = tl.load(starts + block), tl.load(counts + block)
    owner = tl.load(owners + block)
    factors += owner * len(rows)
    scale += owner
    if (aligned != 0) & (count == BLOCK) & (start % width == 0):
        _combine_block(
            rows, result, start, count, factors, scale, program, tile, scaled, True
        )
    else:
        _combine_block(
            rows, result, start, count, factors, scale, program, tile, scaled, False
        )


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def largest_kernel(rows, starts, counts, out, width: tl.constexpr):
    """Store the largest magnitude in a block, infinity for NaN."""
    block = tl.program_id(0).to(tl.int64)
    start, count = tl.load(starts + block), tl.load(counts + block)
    found = tl.zeros([LANES * width], tl.float64)
    for first in range(0, BLOCK, LANES * width):
        for i in tl.static_range(len(rows)):
            at = first + tl.arange(0, LANES * width)
            x = tl.abs(_load(rows[i], start, at, count, False).to(tl.float64))
            found = tl.maximum(found, tl.where(x == x, x, float("inf")))
    tl.store(out + block, tl.max(found, 0))
