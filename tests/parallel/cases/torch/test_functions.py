"""Gathers of objects, empty groups, sums of sparse rows, and refusals of each function."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn

import adasum_hvd.torch as hvd
from adasum_hvd.parallel import ParallelContext
from tests.parallel.cases.torch.test_broadcasting import Pair, last


def case_allgather_object() -> None:
    gathered = hvd.allgather_object({"rank": hvd.rank(), "text": "x" * hvd.rank()})
    assert [g["rank"] for g in gathered] == list(range(hvd.size()))
    assert np.array_equal([len(g["text"]) for g in gathered], range(hvd.size()))


def case_objects() -> None:
    mine = {"pair": Pair(hvd.rank(), torch.ones(2)), "text": "x" * hvd.rank()}
    for rank, of_rank in enumerate(hvd.allgather_object(mine)):
        assert of_rank["pair"].first == rank
        assert of_rank["text"] == "x" * rank
    me = hvd.rank()
    functions = hvd.allgather_object(lambda x: x + me)
    assert [f(1) for f in functions] == [1 + r for r in range(hvd.size())]
    obj = hvd.broadcast_object(mine if hvd.rank() == last() else None, last())
    assert obj["text"] == "x" * last()
    assert hvd.broadcast_object(None) is None
    lock = threading.Lock() if hvd.rank() == last() else 1
    match = rf"expected a picklable object, but got TypeError.* on rank {last()} "
    with pytest.raises(pickle.PicklingError, match=f"allgather_object: {match}"):
        hvd.allgather_object(lock)
    with pytest.raises(pickle.PicklingError, match=f"broadcast_object: {match}"):
        hvd.broadcast_object(lock, last())
    with pytest.raises(ValueError, match="broadcast_object: expected a root_rank in"):
        hvd.broadcast_object(1, hvd.size())


def case_empty_groups() -> None:
    for op in (hvd.Adasum, hvd.AdasumDelta, hvd.Average, "sum"):
        assert hvd.grouped_allreduce([], op=op) == []
        assert hvd.grouped_allreduce_([], op=op) == []
        for start in (hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_):
            handle = start([], op=op)
            assert hvd.poll(handle)
            assert hvd.synchronize(handle) == ()
    with pytest.raises(ValueError, match="reduction op: expected one of"):
        hvd.grouped_allreduce([], op="adasome")
    tensors = [torch.full((2,), float(hvd.rank())) for _ in range(2)]
    group = hvd.grouped_allreduce((t for t in tensors), op="max", name="generated")
    assert [t[0].item() for t in group] == [last(), last()]
    group = hvd.grouped_allreduce_(iter(tensors), op="adasum", name="iterated")
    assert all(a is b for a, b in zip(group, tensors, strict=True))


def rows_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rank + 1 entries, the last twice; rank 1 has none."""
    places = [] if rank == 1 else [*range(rank + 1), rank]
    values = torch.full((len(places), 3), rank + 1.0, dtype=dtype)
    indices = torch.tensor(places, dtype=torch.int64)[None]
    return torch.sparse_coo_tensor(indices, values, (9, 3), check_invariants=True)


def case_sparse_sums() -> None:
    ranks = range(hvd.size())
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        mine = rows_of(hvd.rank(), dtype)
        total = sum(rows_of(rank, dtype).to_dense().double() for rank in ranks)
        for op, expected in (
            (hvd.Sum, total),
            ("sum", total),
            (hvd.Average, total / hvd.size()),
            ("average", total / hvd.size()),
            (0, total / hvd.size()),
        ):
            name = f"rows.{dtype}.{op}"
            handle = hvd.sparse_allreduce_async(mine, name, op)
            result = handle()
            assert result.dtype == dtype
            assert result.shape == mine.shape
            assert result._nnz() == sum(rows_of(r, dtype)._nnz() for r in ranks)
            close = torch.allclose(result.to_dense().double(), expected, rtol=1e-2)
            assert close, (dtype, op)
    handle = hvd.sparse_allreduce_async(rows_of(0, torch.float32))
    assert torch.allclose(
        hvd.synchronize(handle).to_dense(), rows_of(0, torch.float32).to_dense()
    )


def case_sparse_refusals() -> None:
    rows, dense = rows_of(hvd.rank(), torch.float32), torch.ones(3)
    for call in (
        lambda: hvd.allreduce(rows, op=hvd.Adasum, name="rows"),
        lambda: hvd.allreduce_(rows, op=hvd.AdasumDelta, name="rows"),
        lambda: hvd.allreduce_async(rows, op="adasum-grad", name="rows"),
        lambda: hvd.grouped_allreduce([dense, rows], op=hvd.Adasum, name="rows"),
        lambda: hvd.grouped_allreduce_([rows], op=hvd.Adasum, name="rows"),
        lambda: hvd.sparse_allreduce_async(rows, "rows", hvd.Adasum),
    ):
        for error in (ValueError, NotImplementedError):
            with pytest.raises(
                error, match=r"allreduce .*rows.*expected .* got .*to_de"
            ):
                call()
    with pytest.raises(
        ValueError, match=r"rows: Average expected a dense tensor.*spars"
    ):
        hvd.allreduce(rows, name="rows")
    with pytest.raises(ValueError, match="expected Average or Sum, but got Max"):
        hvd.sparse_allreduce_async(rows, "rows", hvd.Max)
    for wrong in (dense, 3.0, torch.eye(3).to_sparse_csr()):
        with pytest.raises(
            ValueError, match="rows: expected a sparse COO tensor, but got"
        ):
            hvd.sparse_allreduce_async(wrong, "rows", hvd.Sum)
    with pytest.raises(
        TypeError, match="allreduce of x: expected a tensor, but got float"
    ):
        hvd.allreduce(3.0, op=hvd.Adasum, name="x")


def case_expanded_in_place() -> None:
    row = torch.full((1, 3), float(hvd.rank() + 1))
    table = row.expand(4, 3)
    expected = hvd.allreduce(table.contiguous(), op=hvd.Adasum, name="expanded.copy")
    assert hvd.allreduce_(table, op=hvd.Adasum, name="expanded") is table
    assert torch.equal(table, expected)
    assert torch.equal(row, expected[:1])


def case_one_tensor_twice_in_place() -> None:
    """Ranks would read elements that others have written."""
    table = torch.full((4, 6), float(hvd.rank()))
    for tensors in ([table, table], [table[:3], table[2:]], [table[:, 1:], table]):
        with pytest.raises(
            ValueError, match=r"the same memory in two of them .*; pass e"
        ):
            hvd.grouped_allreduce_(tensors, op=hvd.Adasum, name="twice")
    assert (table == hvd.rank()).all()
    hvd.grouped_allreduce_([table[:, :2], table[:, 2:]], op=hvd.Adasum, name="once")
    copies = hvd.allgather_object(table.tolist())
    assert copies == copies[:1] * hvd.size()


@pytest.mark.parametrize(
    "name", ["bool", "complex64", "uint8", "float8_e4m3fn", "bfloat16"]
)
def case_dtypes_that_nobody_adds_up_have_names(name: str) -> None:
    mine = torch.ones(3).to(getattr(torch, name))
    match = (
        rf"allreduce of mine: {{}} expected a dtype .*, but got torch\.{name} \(rank"
    )
    with pytest.raises(ValueError, match=match.format("Average")):
        hvd.allreduce(mine, name="mine")
    if name != "bfloat16":
        with pytest.raises(ValueError, match=match.format("Adasum")):
            hvd.grouped_allreduce([mine], op=hvd.Adasum, name="mine")


def case_reducer_refuses_what_it_would_lose() -> None:
    reducer = hvd.DistributedGradReducer([nn.Parameter(torch.zeros(3, 3))], mean=True)
    for wrong in (torch.full((3, 3), 1j), torch.eye(3).to_sparse_csr()):
        with pytest.raises(
            ValueError, match="expected real gradients of a float dtype, dense or COO"
        ):
            reducer((wrong,))
    for wrong in (torch.eye(3).numpy(), (g for g in [torch.eye(3)])):
        with pytest.raises(
            TypeError, match="expected a tensor, or a list or tuple of t"
        ):
            reducer(wrong)
    with pytest.raises(ValueError, match="expected one that is registered"):
        hvd.DistributedGradReducer([], mean=True, group=hvd.ProcessSet([0]))


def case_marks_refuse_what_holds_parameters() -> None:
    model = nn.Linear(2, 2)
    for wrong in (model, model.parameters(), [model.weight], "weight"):
        with pytest.raises(
            TypeError, match="mark_worker_local: expected parameters, va"
        ):
            hvd.mark_worker_local(wrong)
        with pytest.raises(
            TypeError, match="mark_replicated_over: expected parameters"
        ):
            hvd.mark_replicated_over(hvd.global_process_set, wrong)
    with pytest.raises(TypeError, match="mark_replicated_over: expected a process set"):
        hvd.mark_replicated_over([0], model.weight)


def case_cells_name_gradients_that_are_none() -> None:
    if hvd.size() == 1:
        pytest.skip("a cell needs two ranks")
    model = nn.Linear(2, 2)
    cell = hvd.AdaSumByGradWrapCell(
        torch.optim.SGD(model.parameters(), 0.1),
        relaxed=True,
        context=ParallelContext("auto_parallel", hvd.size()),
    )
    before = model.weight.detach().clone()
    for wrong, found in (
        ((None, model.bias), r"parameter 0, but got None;"),
        ((model.weight.detach(), 1.0), r"parameter 1, but got float"),
    ):
        with pytest.raises(ValueError, match=found):
            cell(wrong)
    cell(torch.ones_like(p) for p in model.parameters())
    assert torch.allclose(model.weight, before - 0.1)
