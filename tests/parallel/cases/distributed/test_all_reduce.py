"""`adasum_all_reduce`, under torchrun and without Horovod."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._tensor import DTensor  # where torch 2.4 has it, too
from torch.distributed.device_mesh import init_device_mesh

from adasum_hvd import reference
from adasum_hvd.distributed import (
    adasum_all_reduce,
    exchange,
    mark_worker_local,
    native,
    reduce_changes,
    torchft,
)
from adasum_hvd.distributed.communicator import Communicator, RanksLost
from adasum_hvd.distributed.reduction import reduce_tensors
from adasum_hvd.distributed.rules import Rule
from tests.parallel.harness import conformance
from tests.parallel.harness.conformance import (
    CHECKS,
    Engine,
    check_close,
    expected,
    reduced,
    tensor_of,
)
from tests.parallel.harness.models import loss_of, model_of, weights
from tests.parallel.harness.processes import descriptors

HOSTS: list[str] = []


def init() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    HOSTS[:] = os.environ.get("ADASUM_TEST_HOST_OF", "0" * dist.get_world_size())


def rank() -> int:
    return dist.get_rank()


def align() -> None:
    dist.barrier()


def shutdown() -> None:
    dist.destroy_process_group()


def reduce_in_place(tensor: torch.Tensor, name: str) -> torch.Tensor:
    adasum_all_reduce(tensor)
    return tensor


def reduce_several(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Reduce in the thread, and the other functions in the program's."""
    work = adasum_all_reduce(tensors, async_op=True)
    assert work.wait() and work.is_completed()
    assert work.get_future().wait() == tensors
    return tensors


def gather(thing: object) -> list[object]:
    things: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def engine() -> Engine:
    return Engine(
        rank(),
        HOSTS,
        lambda tensor, name: reduce_in_place(tensor.clone(), name),
        reduce_in_place,
        reduce_several,
        gather,
    )


def case_every_dtype_and_size() -> dict[str, str]:
    return conformance.every_dtype_and_size(engine())


@pytest.mark.parametrize("check", CHECKS)
def case_conformance(check: str) -> None:
    getattr(conformance, check)(engine())


def case_as_on_a_device() -> None:
    """A program that waits for no value forms the nodes of all tensors: the same bits."""

    def results() -> list[torch.Tensor]:
        tensors = [tensor_of(rank(), n, torch.float32, 12) for n in (9000, 70, 5000)]
        tensors[1] *= -1 if rank() % 2 else 1
        return reduce_several(tensors, "device")

    expected = results()
    with mock.patch.object(exchange, "WAITING", ()):
        conformance.cancelling_pairs(engine())
        conformance.properties(engine())
        assert all(map(torch.equal, results(), expected))


def case_many_in_flight() -> None:
    """Asynchronous reductions among collectives of the program, and of another length each."""
    tensors = [tensor_of(rank(), 50 + 900 * k, torch.float32, k) for k in range(12)]
    works = [adasum_all_reduce(tensor, async_op=True) for tensor in tensors]
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total[0] == dist.get_world_size()
    for k in range(8):  # ranks come to these at different times
        time.sleep(0.002 * rank())
        own = tensor_of(rank(), 30 + 70 * k, torch.float32, 90 + k)
        adasum_all_reduce(own)
        check_close(
            own, expected(engine(), 30 + 70 * k, torch.float32, 90 + k), torch.float32
        )
    for k, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        check_close(
            tensor, expected(engine(), 50 + 900 * k, torch.float32, k), torch.float32
        )


def case_several_dtypes_and_empty_lists() -> None:
    adasum_all_reduce([])
    mixed = [torch.float16, torch.float32, torch.float16, torch.float64]
    tensors = [tensor_of(rank(), 2000, dtype, 40 + k) for k, dtype in enumerate(mixed)]
    adasum_all_reduce(tensors)
    for k, (tensor, dtype) in enumerate(zip(tensors, mixed, strict=True)):
        check_close(tensor, expected(engine(), 2000, dtype, 40 + k), dtype)
    weight = torch.ones(3, requires_grad=True)
    adasum_all_reduce(weight)
    assert torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize("group_size", [0, 2])
@pytest.mark.parametrize("group_op", ["average", "sum"])
def case_groups(group_op: str, group_size: int) -> None:
    tensors = [tensor_of(r, 9000, torch.float32, 50) for r in range(len(HOSTS))]
    correct = reference.adasum(
        [t.numpy() for t in tensors], HOSTS, group_op, group_size
    )
    mine = tensors[rank()]
    adasum_all_reduce(mine, group_op=group_op, group_size=group_size)
    check_close(mine, correct, torch.float32)


def mean_of(gram: torch.Tensor) -> torch.Tensor:
    assert gram.dtype == torch.float64 and torch.equal(gram, gram.mT)
    return torch.full(gram.shape[:2], 1 / gram.shape[1], dtype=torch.float64)


def by_norm(gram: torch.Tensor) -> torch.Tensor:
    """Weigh each rank by its norm, over all tensors."""
    norms = gram.diagonal(dim1=1, dim2=2)
    return norms / norms.sum()


def case_rules() -> None:
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.float64):
        means = []
        for rule in ("mean", mean_of):
            mine = [tensor_of(rank(), 9000, dtype, 60), tensor_of(rank(), 5, dtype, 61)]
            adasum_all_reduce(mine, rule=rule)
            means.append(mine[0])
        everyone = [tensor_of(r, 9000, dtype, 60) for r in range(size)]
        for mean in means:
            check_close(mean, torch.stack(everyone).double().mean(0).numpy(), dtype)
    several = [
        [tensor_of(r, n, torch.float32, 62) for n in (9000, 70)] for r in range(size)
    ]
    norms = np.array([[t.double().square().sum() for t in ts] for ts in several])
    adasum_all_reduce(several[rank()], rule=by_norm)
    others = [
        [tensor_of(r, n, torch.float32, 62) for n in (9000, 70)] for r in range(size)
    ]
    for k, mine in enumerate(several[rank()]):
        stacked = np.stack([ts[k].double().numpy() for ts in others])
        check_close(mine, (norms[:, k] / norms.sum()) @ stacked, torch.float32)


def case_process_group() -> None:
    evens = list(range(0, dist.get_world_size(), 2))
    group = dist.new_group(evens)
    mine = tensor_of(rank(), 70_000, torch.float32, 8)
    if rank() in evens:
        correct = reduced(
            [tensor_of(r, 70_000, torch.float32, 8) for r in evens],
            [HOSTS[r] for r in evens],
        )
        adasum_all_reduce(mine, group)
        check_close(mine, correct, torch.float32)
        again = tensor_of(rank(), 70_000, torch.float32, 8)
        adasum_all_reduce(again, group, async_op=True).wait()
        assert torch.equal(again, mine)
    else:
        with pytest.raises(ValueError, match=r"a process group that this rank is in"):
            adasum_all_reduce(mine, group)


def case_delta_variant() -> None:
    """Every rank takes its own steps; AdaSum joins the changes of each weight."""
    model, simulated = model_of(), [model_of() for _ in HOSTS]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    end = reduce_changes(optimizer)
    others = [torch.optim.Adam(one.parameters(), 0.01) for one in simulated]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank(), step).backward()
        optimizer.step()
        starts = [p.detach().clone() for p in simulated[0].parameters()]
        for other, (one, own) in enumerate(zip(simulated, others, strict=True)):
            own.zero_grad()
            loss_of(one, other, step).backward()
            own.step()
        replicas = zip(*(one.parameters() for one in simulated), strict=True)
        for start, several in zip(starts, replicas, strict=True):
            changes = [(p.detach() - start).numpy() for p in several]
            joined = torch.from_numpy(reference.adasum(changes, HOSTS)).float()
            for p in several:
                p.data.copy_(start + joined)
    conformance.check_same_everywhere(engine(), [weights(model)])
    torch.testing.assert_close(weights(model), weights(simulated[0]))
    end()
    before = weights(model).clone()
    loss_of(model, rank(), 9).backward()
    optimizer.step()
    digests = gather(conformance.digest_of([weights(model) - before]))
    assert len(set(digests)) == len(HOSTS)


def case_a_marked_parameter_keeps_its_own_change() -> None:
    model = model_of()
    mark_worker_local(model[0].bias)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    reduce_changes(optimizer)
    loss_of(model, rank(), 0).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        digests = set(gather(conformance.digest_of([parameter])))
        assert len(digests) == (len(HOSTS) if name == "0.bias" else 1), name


class Wrapped:
    """The ranks' process group, with the methods of torchft's."""

    def __init__(self) -> None:
        self._inside = dist.group.WORLD._get_backend(torch.device("cpu"))
        self.size, self.alltoall_base = self._inside.size, self._inside.alltoall_base

    def getBackendName(self) -> str:
        return "torchft-gloo"


def case_replicas_of_a_quorum() -> None:
    """They find their numbers, and reduce as ranks of hosts of their own."""
    quorum = torchft._Quorum(Wrapped())
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, quorum.rank)
    assert sorted(everyone) == list(range(quorum.size))
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(quorum.size, 5000, generator=generator)
    mine = rows[quorum.rank].clone()
    reduce_tensors([mine], quorum, Rule("adasum"))
    expected = reference.adasum(list(rows.double().numpy()))
    torch.testing.assert_close(mine.double(), torch.from_numpy(expected))


def case_negative_views() -> None:
    """Tensors whose memory holds the numbers with another sign; conj() makes them."""
    mine = tensor_of(rank(), 9000, torch.float32, 9)
    views = [torch._neg_view(-mine), torch.complex(mine, -mine).conj().imag]
    adasum_all_reduce(mine)
    for view in views:
        assert view.is_neg()
        adasum_all_reduce(view)
        assert torch.equal(view.resolve_neg(), mine)


@pytest.mark.parametrize("async_op", [False, True])
def case_every_rank_writes_small_tensors(async_op: bool) -> None:
    """Also ranks whose slice is empty: versions show it, and inference tensors are as others."""
    mine = tensor_of(rank(), 3, torch.float32, 14)
    with torch.inference_mode():
        own = mine.clone()
    version = mine._version
    for tensor in (mine, own):
        if work := adasum_all_reduce(tensor, async_op=async_op):
            work.wait()
        assert mine._version > version
    assert torch.equal(own, mine)


def case_another_default_device() -> None:
    tensors = [tensor_of(rank(), size, torch.float32, 13) for size in (9000, 70)]
    expected = reduce_several([t.clone() for t in tensors], "device")
    with torch.device("meta"):
        reduce_several(tensors, "device")
        adasum_all_reduce(tensor_of(rank(), 33, torch.float32, 13))
    assert all(map(torch.equal, tensors, expected))


def case_errors_of_a_rule_are_its_own_calls() -> None:
    """The thread goes on with the next reduction, unless a rank is unresponsive."""

    def wrong(gram: torch.Tensor) -> torch.Tensor:
        return gram @ torch.ones(1, 99)

    for _ in range(2):
        work = adasum_all_reduce(torch.ones(3), rule=wrong, async_op=True)
        with pytest.raises(RuntimeError, match=r"mat|size|shape|expand"):
            work.wait()
    good = torch.ones(3)
    adasum_all_reduce(good, async_op=True).wait()
    assert torch.equal(good, torch.ones(3))


def case_a_failure_of_one_rank_ends_the_others() -> None:
    if os.environ.get("ADASUM_HVD_CORE") == "off" or len(set(HOSTS)) == 1:
        pytest.skip("needs the core over several hosts")
    group = dist.new_group(timeout=timedelta(seconds=100))
    adasum_all_reduce(torch.ones(3), group)
    none_left = mock.patch.object(native._Messages, "start", side_effect=MemoryError)
    began = time.monotonic()
    kind = RanksLost if rank() else MemoryError
    with nullcontext() if rank() else none_left, pytest.raises(kind):
        adasum_all_reduce(torch.ones(100_000), group)
    assert time.monotonic() - began < 30
    with pytest.raises(RuntimeError):  # of no use any more
        adasum_all_reduce(torch.ones(3), group)


def case_one_rank_that_cannot_use_the_core() -> None:
    """All ranks reduce by torch's operations, and know why."""
    if os.environ.get("ADASUM_HVD_CORE") == "off" or HOSTS.count(HOSTS[0]) == 1:
        pytest.skip("needs the core's shared memory")
    adasum_all_reduce(torch.ones(3))  # loads the core
    lacks = {
        lambda: descriptors(0): "(rank 0)",
        lambda: descriptors(3): "(rank 0)",  # it meets the others, and cannot connect
        lambda: mock.patch.object(native, "__version__", "0.1"): "different versions",
    }
    for lack, why in lacks.items():
        communicator = Communicator(group := dist.new_group())
        native.sites_of(communicator)  # reads files
        mine = tensor_of(rank(), 70, torch.float32, 9)
        with nullcontext() if rank() else lack():
            adasum_all_reduce(mine, group)
        check_close(mine, expected(engine(), 70, torch.float32, 9), torch.float32)
        described = native.described(communicator, Rule("adasum"))
        assert described.startswith("reduced by torch's operations (")
        assert why in described, described


def case_a_group_that_cannot_reduce() -> None:
    communicator = Communicator(group := dist.new_group())
    with pytest.raises(ValueError, match=r"on cpu or cuda, but got some on xpu:0 "):
        communicator.on_gloo(torch.device("xpu", 0))
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(RuntimeError, match="process group, but it has been destroyed"):
        communicator.all_gather_object(1)


def case_closed_connections_end_the_waits_of_all_ranks() -> None:
    """Also where the connection to one of them was closed before."""
    if len(HOSTS) < 3:
        pytest.skip("needs a third rank")
    group = dist.new_group(timeout=timedelta(seconds=60))
    communicator = Communicator(group)
    communicator.all_gather_object("connected")
    for closing in (0, 1):
        if rank() == closing:
            communicator.close()
        dist.barrier()
    if rank() == 2:
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), 1, group)
        assert time.monotonic() - began < 20
    dist.barrier()


def case_a_destroyed_group_leaves_no_thread() -> None:
    before = threading.active_count()
    for _ in range(2):
        group = dist.new_group()
        adasum_all_reduce(torch.ones(3), group, async_op=True).wait()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
    for thread in threading.enumerate():
        if thread.name == "adasum_hvd" and threading.active_count() > before:
            thread.join(timeout=1)
    assert threading.active_count() <= before


def resident_bytes(key: str) -> int:
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(key)
    ]
    return int(line.split()[1]) * 1024


def extra_bytes(tensors: list[torch.Tensor]) -> int:
    """Return by how much a reduction raises the peak of the memory that this rank uses."""
    adasum_all_reduce([tensor[:10] for tensor in tensors])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    adasum_all_reduce(tensors)
    return resident_bytes("VmHWM") - before


def case_memory() -> dict[str, float]:
    """The core copies a tensor, and maps this rank's slice of the other ranks' copies.

    On one host it does so for one tensor of a list after the other. Torch's operations need what a
    rank receives, and a copy of a list. 8 MiB more are for the blocks in work.
    """
    elements, margin = 16 << 20, 8 << 20
    one = [torch.full((elements,), 1.0 + rank())]
    several = [torch.full((elements // 4,), 1.0 + rank()) for _ in range(4)]
    found = extra_bytes(one), extra_bytes(several)
    by_core = os.environ.get("ADASUM_HVD_CORE") != "off"
    in_turn = by_core and len(set(HOSTS)) == 1
    assert found[0] <= (2 if by_core else 1) * 4 * elements + margin, found
    assert found[1] <= (found[0] if in_turn else 2 * 4 * elements) + margin, found
    return {"one": found[0] / 4 / elements, "several": found[1] / 4 / elements}


def refused(words: str, tensors, **arguments) -> None:
    """Check that a call raises on this rank, whether it waits or not, and changes nothing."""
    several = tensors if isinstance(tensors, list) else [tensors]
    before = [t.clone() if isinstance(t, torch.Tensor) else t for t in several]
    with pytest.raises(ValueError, match=words):
        adasum_all_reduce(tensors, **arguments)
    work = adasum_all_reduce(tensors, async_op=True, **arguments)
    with pytest.raises(ValueError, match=words):
        work.wait()
    for one, other in zip(several, before, strict=True):
        if type(one) is torch.Tensor and not (one.is_sparse or one.is_nested):
            assert torch.equal(one, other)


def case_what_is_refused_on_all_ranks() -> None:
    last = dist.get_world_size() - 1
    odd = rank() == last
    match = rf"but got float32 \[3\] on cpu as tensor 1 on rank {last} and float32 \[5\] on cpu"
    refused(match, [torch.ones(2), torch.ones(3 if odd else 5)])
    refused(
        "same tensors in the same order", torch.ones(6).view((3, 2) if odd else (2, 3))
    )
    refused("got float64", torch.ones(4, dtype=torch.float64 if odd else torch.float32))
    refused("got none as tensor 1", [torch.ones(2) for _ in range(1 if odd else 2)])
    refused("got rule=mean", torch.ones(2), rule="mean" if odd else "adasum")
    refused(
        "got group_size=2",
        torch.ones(2),
        group_op="average",
        group_size=2 if odd else 1,
    )
    refused(
        f"got torch.int64 on rank {last}",
        torch.ones(2, dtype=torch.int64 if odd else None),
    )
    refused("got torch.complex64 on rank 0", torch.ones(2, dtype=torch.complex64))
    refused("got int", [torch.ones(2), 3])
    refused(f"got NoneType on rank {last} of", None if odd else torch.ones(2))
    refused("an expanded one on rank 0 of .*; clone it", torch.ones(1).expand(3))
    refused("an expanded one", torch.ones(10).as_strided((4, 3), (2, 1)))
    table = torch.full((4, 6), float(rank()))
    refused("the same memory in two of them on rank 0 .*; pass ea", [table, table])
    refused("the same memory in two", [table[:3], torch.ones(2), table[2:]])
    refused("the same memory in two", [table[:, :2], table[:, :2]])
    refused("the same memory in two", [table[:, 2:4], table])
    assert (table == rank()).all()
    adasum_all_reduce([table[:, :2], table[:, 2:], table[:, :0], table[:, :0]])
    refused("got one that is nested", torch.nested.nested_tensor([torch.ones(2)]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    refused("got a DTensor .*use adasum_rep", DTensor.from_local(torch.ones(8), mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused("got one that is torch.sparse_coo", torch.ones(2, 2).to_sparse())
    refused("rule: expected one of adasum, mean", torch.ones(2), rule="median")
    refused(
        "group_op: expected rule='adasum'", torch.ones(2), rule="mean", group_op="sum"
    )
    refused("group_op: expected one of", torch.ones(2), group_op="product")
    refused("group_size: expected an integer", torch.ones(2), group_size=-1)
    refused(
        r"expected coefficients of shape \(1, ",
        torch.ones(2),
        rule=lambda gram: gram[0],
    )
    good = torch.ones(3)
    adasum_all_reduce(good)
    assert torch.equal(good, torch.ones(3))
