"""The torch gradient reducer, the replica check and the banner, on real ranks."""

from __future__ import annotations

import os

import pytest
import torch
from horovod.torch import mpi_ops
from torch import nn

import adasum_hvd.torch as hvd


def total(of) -> float:
    return float(sum(of(rank) for rank in range(hvd.size())))


def case_reducer_sums_and_means() -> None:
    params = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float16), torch.zeros(())]
    gradients = tuple(torch.full_like(p, hvd.rank() + 1.0) for p in params)
    for mean, degree, divisor in (
        (True, None, hvd.size()),
        (False, 7, 1),
        (True, 3, 3),
    ):
        reducer = hvd.DistributedGradReducer(params, mean, degree)
        reduced = reducer(gradients)
        assert isinstance(reduced, tuple)
        for result, given in zip(reduced, gradients, strict=True):
            expected = torch.tensor(total(lambda r: r + 1), dtype=torch.float32)
            expected = (expected * torch.tensor(1.0 / divisor)).to(given.dtype)
            assert result.dtype == given.dtype
            assert result.shape == given.shape
            assert torch.equal(result, expected.expand(given.shape))
        assert all(
            torch.equal(g, torch.full_like(g, hvd.rank() + 1.0)) for g in gradients
        )
    single = hvd.DistributedGradReducer([params[0]], mean=True)(gradients[0])
    assert isinstance(single, torch.Tensor)


def case_reducer_without_a_mean_warns() -> None:
    """MindSpore sums unless its context says otherwise."""
    parameter, gradient = torch.zeros(2), torch.full((2,), hvd.rank() + 1.0)
    for mean in ((), (None,)):
        with pytest.warns(UserWarning, match="summed by MindSpore's default") as caught:
            reducer = hvd.DistributedGradReducer([parameter], *mean)
        assert caught[0].filename == __file__
        expected = torch.full((2,), (hvd.size() + 1) / 2)
        torch.testing.assert_close(reducer(gradient), expected)
    with pytest.raises(TypeError, match="mean: expected a bool, but got 1"):
        hvd.DistributedGradReducer([parameter], 1)


def case_reducer_adds_float16_in_float32() -> None:
    parameter = torch.zeros(1, dtype=torch.float16)
    big = torch.full((1,), 40000.0, dtype=torch.float16)
    mean = hvd.DistributedGradReducer([parameter], mean=True)(big)
    assert mean.item() == 40000.0  # a float16 sum would have overflowed


def fused(reducer, gradients) -> list[int]:
    """Return how many tensors each reduction of a call carries."""
    carried = []
    reduce = mpi_ops.grouped_allreduce_

    def watch(tensors, **arguments):
        carried.append(len(tensors))
        return reduce(tensors, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_ops, "grouped_allreduce_", watch)
        reducer(gradients)
    return carried


def case_reducer_leaves_what_is_local() -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(5)]
    params[1].layerwise_parallel = True
    params[2].is_in_shard = True
    hvd.mark_worker_local(params[3])
    hvd.mark_replicated_over(hvd.global_process_set, params[4])
    gradients = tuple(torch.full((2,), hvd.rank() + 1.0) for _ in params)
    reduced = hvd.DistributedGradReducer(params, mean=True)(gradients)
    assert torch.equal(reduced[0], torch.full((2,), (hvd.size() + 1) / 2))
    for result, given in zip(reduced[1:], gradients[1:], strict=True):
        assert torch.equal(result, given)


def case_reducer_keeps_sparse_entries_apart() -> None:
    """Entries of one position are not added up, least of all in float16."""
    table = nn.Parameter(torch.zeros(4, 1, dtype=torch.float16))
    entries = torch.full((2, 1), 40000.0, dtype=torch.float16)
    gradient = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), entries, (4, 1))
    reduced = hvd.DistributedGradReducer([table], mean=True)(gradient)
    assert reduced._nnz() == 2 * hvd.size()
    share = torch.tensor(40000.0).mul(1.0 / hvd.size()).half()
    assert torch.equal(reduced._values(), share.expand(2 * hvd.size(), 1))


def case_reducer_groups() -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(5)]
    params[1].layerwise_parallel = True
    gradients = tuple(torch.full((2,), hvd.rank() + float(k)) for k in range(5))
    plain = hvd.DistributedGradReducer(params, mean=False)(gradients)
    assert torch.equal(plain[1], gradients[1])
    split = hvd.DistributedGradReducer(params, mean=False, split_indices=[1, 3])
    assert fused(split, gradients) == [1, 2, 1]  # one keeps its own gradient
    with pytest.warns(UserWarning, match="expected indices below 5"):
        hvd.DistributedGradReducer(params, True, split_indices=[9])
    for index, parameter in enumerate(params):
        parameter.comm_fusion = index % 2
    own = hvd.DistributedGradReducer(params, mean=False)
    assert fused(own, gradients) == [3, 1]
    # `fusion_type` is the number of the parameters that have none.
    for index in (0, 3):
        del params[index].comm_fusion
    joined = hvd.DistributedGradReducer(params, mean=False, fusion_type=0)
    assert fused(joined, gradients) == [4]
    apart = hvd.DistributedGradReducer(params, mean=False, fusion_type=7)
    assert fused(apart, gradients) == [2, 2]
    for results in (r(gradients) for r in (split, own, joined, apart)):
        assert all(torch.equal(a, b) for a, b in zip(results, plain, strict=True))
    if hvd.size() > 2:
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            reducer = hvd.DistributedGradReducer(params[:1], True, group=pair)
            assert torch.equal(reducer(gradients[0]), torch.full((2,), 0.5))
        hvd.remove_process_set(pair)


def case_reducer_sparse_and_in_place() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    bias = nn.Parameter(torch.zeros(2))
    unused = nn.Parameter(torch.zeros(2))
    (table(torch.tensor([hvd.rank(), 9])) + bias).sum().backward()
    reducer = hvd.DistributedGradReducer([table.weight, bias, unused], mean=True)
    reducer.reduce_gradients()
    dense = table.weight.grad.to_dense()
    assert torch.allclose(dense[9], torch.ones(2))
    for rank in range(hvd.size()):
        assert torch.allclose(dense[rank], torch.full((2,), 1 / hvd.size()))
    assert torch.equal(bias.grad, torch.full((2,), 2.0))
    assert torch.equal(unused.grad, torch.zeros(2))


def case_reducer_gives_no_gradient_to_what_is_not_reduced() -> None:
    frozen, local, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    hvd.mark_worker_local(local)
    hvd.DistributedGradReducer([frozen, local, unused], mean=True).reduce_gradients()
    assert frozen.grad is local.grad is None
    assert torch.equal(unused.grad, torch.zeros(2))


def case_reducer_refuses() -> None:
    for degree in (0, -1, 2.0, "2", True):
        with pytest.raises(ValueError, match="degree: expected an integer >= 1"):
            hvd.DistributedGradReducer([torch.zeros(1)], degree=degree)
    with pytest.raises(
        ValueError, match="expected 1 gradients, one per parameter, but got 2"
    ):
        hvd.DistributedGradReducer([torch.zeros(1)])((torch.ones(1), torch.ones(1)))
    with pytest.raises(TypeError, match=r"but got \(name, parameter\) pairs"):
        hvd.DistributedGradReducer(nn.Linear(1, 1).named_parameters())
    with pytest.raises(ValueError, match=r"of a float dtype.*but got torch\.int64"):
        hvd.DistributedGradReducer([torch.zeros(1)])(
            (torch.ones(1, dtype=torch.int64),)
        )


@pytest.mark.parametrize("op", ("average", "adasum-delta"))
def case_names_as_in_the_optimizer_of_horovod(op: str) -> None:
    model = nn.Linear(2, 3)
    plain = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
    assert optimizer._parameter_names == {
        model.weight: "weight",
        model.bias: "bias",
    }


def case_seed_example() -> None:
    """MindSpore's documented example: loss 256, here with a loss weight by rank."""
    weight = nn.Parameter(torch.ones(16, 10))
    loss = ((torch.ones(16, 16) @ weight) ** 2).mean()
    assert loss.item() == 256.0
    (loss * (hvd.rank() + 1)).backward()
    hvd.DistributedGradReducer([weight], mean=True).reduce_gradients()
    mean_weight = (hvd.size() + 1) / 2
    torch.testing.assert_close(weight.grad, torch.full((16, 10), 3.2 * mean_weight))


def case_check_replicas() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert hvd.check_replicas(model)
    assert [hvd.check_replicas(model, every=3) for _ in range(5)] == [
        False,
        False,
        True,
        False,
        False,
    ]
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, op="adasum-grad")
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert hvd.check_replicas(nn.Sequential(model[0]), optimizer)
    if hvd.size() > 1:
        last = hvd.size() - 1
        if hvd.rank() == last:
            model[0].bias.data[1] += 1e-7
        fresh = nn.Sequential(model[0])
        with pytest.raises(
            hvd.ReplicaMismatch, match=rf"another 0\.bias on ranks \[{last}\]"
        ):
            hvd.check_replicas(fresh)


def case_banner() -> None:
    model = nn.Linear(100, 100).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, op="adasum-delta", local_steps=2)
    line = hvd.banner(optimizer)
    assert "AdasumDelta (delta variant)" in line
    assert f"{hvd.size()} ranks on {'MPI' if hvd.mpi_enabled() else 'Gloo'}" in line
    assert "2 local steps" in line
    assert "learning rate 1 times the best of one worker" in line
    if hvd.size() > 1:
        network = os.environ.get("ADASUM_HVD_LOCAL") == "off"
        assert f"exchange over {'network' if network else 'shared memory'}" in line
        assert "float32 on the wire" in line
        assert optimizer.extra_bytes() == {"device": 0, "host": 2 * 4 * 10_100}
    else:
        assert optimizer.extra_bytes() == {"device": 0, "host": 0}
