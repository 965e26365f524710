"""Torch's operations on hosts of one size, which reduce in levels."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from adasum_hvd.distributed import LocalSGD, adasum_all_reduce
from adasum_hvd.distributed.communicator import Communicator, RanksLost
from adasum_hvd.distributed.reduction import reduce_tensors
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.reference import groups_of
from tests.parallel.cases.distributed.test_all_reduce import HOSTS, gather
from tests.parallel.cases.distributed.test_all_reduce import align as align
from tests.parallel.cases.distributed.test_all_reduce import init as init
from tests.parallel.cases.distributed.test_all_reduce import rank as rank
from tests.parallel.cases.distributed.test_all_reduce import shutdown as shutdown
from tests.parallel.harness.conformance import by_levels, tensor_of
from tests.parallel.harness.models import loss_of, model_of, sgd

ELEMENTS = 1 << 18
TABLES_BYTES = 64 << 10  # comparisons of the ranks' calls, and Gram matrices


def expected_of(inputs: list[torch.Tensor], group_op: str = "adasum") -> torch.Tensor:
    """Return the result of flat tensors, by rank."""
    hosts = groups_of(HOSTS)
    order = [rank for host in hosts for rank in host]
    radices = len(hosts[0]), len(hosts)
    return by_levels([inputs[rank] for rank in order], radices, group_op)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("group_op", ["adasum", "average", "sum"])
def case_results_are_rounded_in_each_level(group_op: str, dtype: str) -> None:
    """Of tensors alone, of a list, and of reductions in flight."""
    sizes = (9000, 0, 7, 70_001)
    lists = [
        [tensor_of(r, n, getattr(torch, dtype)) for n in sizes]
        for r in range(len(HOSTS))
    ]
    alone, together, *flying = ([t.clone() for t in lists[rank()]] for _ in range(4))
    words = {"group_op": group_op}
    works = [adasum_all_reduce(one, async_op=True, **words) for one in flying]
    for tensor in alone:
        adasum_all_reduce(tensor, **words)
    adasum_all_reduce(together, **words)
    for work in works:
        work.wait()
    for number in range(len(sizes)):
        expected = expected_of([own[number] for own in lists], group_op)
        for found in (alone, together, *flying):
            assert (found[number] != expected).sum() <= 1 + sizes[number] // 1000
            torch.testing.assert_close(found[number], expected)
            assert torch.equal(found[number], alone[number])


def bytes_to_other_hosts(reduce: Callable[[torch.Tensor], object]) -> int:
    """Return how many bytes leave this rank's host in a reduction."""
    sent, send = [], dist.batch_isend_irecv

    def counting(operations: list) -> list:
        for one in operations:
            if one.op is dist.isend and HOSTS[one.peer] != HOSTS[rank()]:
                sent.append(one.tensor.nbytes)
        return send(operations)

    tensor = tensor_of(rank(), ELEMENTS, torch.float32)
    with mock.patch.object(dist, "batch_isend_irecv", counting):
        reduce(tensor)
    of_ranks = zip(HOSTS, gather(sum(sent)), strict=True)
    return sum(count for host, count in of_ranks if host == HOSTS[rank()])


def case_bytes_that_leave_a_host() -> None:
    """At most 2 n (1 - 1/H) for all its ranks together."""
    hosts, size = len(set(HOSTS)), 4 * ELEMENTS
    limit = 2 * size * (hosts - 1) // hosts
    for words in ({}, {"group_op": "average"}, {"rule": "mean"}):
        found = bytes_to_other_hosts(lambda t, w=words: adasum_all_reduce(t, **w))
        assert limit <= found <= limit + TABLES_BYTES
    flat = bytes_to_other_hosts(lambda t: adasum_all_reduce(t, rule="rda"))
    assert flat >= limit * len(HOSTS) // hosts


def case_the_mean_is_that_of_all_ranks() -> None:
    several = [tensor_of(r, 9000, torch.float64) for r in range(len(HOSTS))]
    mine = several[rank()].clone()
    adasum_all_reduce(mine, rule="mean")
    torch.testing.assert_close(mine, torch.stack(several).mean(0))


def case_parts_of_a_group_need_no_collective() -> None:
    """Such as NCCL's, which would be one of all its ranks."""
    tensors = [tensor_of(r, ELEMENTS, torch.float32) for r in range(len(HOSTS))]
    with mock.patch.object(Communicator, "on_gloo", lambda *_: False):
        adasum_all_reduce(tensors[rank()])
    again = tensor_of(rank(), ELEMENTS, torch.float32)
    adasum_all_reduce(again)
    assert torch.equal(tensors[rank()], again)


def case_local_steps() -> None:
    model, simulated = model_of(), [model_of() for _ in HOSTS]
    optimizer = sgd(model.parameters())
    LocalSGD(optimizer, model, dist.group.WORLD, 3)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank(), step).backward()
        optimizer.step()
    starts = [parameter.detach().clone() for parameter in model_of().parameters()]
    for other, one in enumerate(simulated):
        own = sgd(one.parameters())
        for step in range(3):
            own.zero_grad()
            loss_of(one, other, step).backward()
            own.step()
    ends = zip(*(one.parameters() for one in simulated), strict=True)
    for found, start, several in zip(model.parameters(), starts, ends, strict=True):
        changes = [(end.detach() - start).flatten() for end in several]
        change = (found.detach() - start).flatten()
        torch.testing.assert_close(change, expected_of(changes), rtol=1e-4, atol=1e-7)


def case_an_error_names_a_rank_of_a_level() -> None:
    """Ranks that wait for another rank's part raise within the timeout, in whichever level."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    communicator = Communicator(group)
    adasum_all_reduce(torch.ones(3), group)
    if rank() != len(HOSTS) - 1:
        mine = tensor_of(rank(), 90_000, torch.float32)
        with pytest.raises(RanksLost) as error:
            reduce_tensors([mine], communicator, Rule("adasum"))
        (host,) = (one for one in groups_of(HOSTS) if rank() in one)
        across = [one[host.index(rank())] for one in groups_of(HOSTS)]
        named = re.search(r"all ranks, but rank (\d) did not", str(error.value))
        assert named and int(named[1]) in {*host, *across} - {rank()}, error.value
        # Its connections are closed, which the start of a message finds.
        with pytest.raises(RanksLost, match=r"one of ranks \[") as error:
            communicator.all_gather(mine)
        listed = re.search(r"ranks \[(.*)\] did not", str(error.value))
        assert listed and str(rank()) not in listed[1].split(", "), error.value
    dist.barrier()
