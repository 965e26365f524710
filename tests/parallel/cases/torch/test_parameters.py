"""Parameters that are frozen, sparse, short, a rank's own, or converted."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import adasum_hvd.torch as hvd
from tests.parallel.harness.models import (
    batch_of,
    loss_of,
    model_of,
)
from tests.parallel.harness.torch_training import (
    check_equal,
    check_same_everywhere,
    distributed,
)
from tests.parallel.harness.torch_training import start as start


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta", "average"])
def case_unused_and_frozen(op: str) -> None:
    """A parameter that only some ranks used moves alike everywhere; one that none used, not."""
    model = nn.ModuleList([nn.Linear(4, 2) for _ in range(4)])
    for p in model.parameters():
        torch.nn.init.constant_(p, 0.3)
    model[3].requires_grad_(False)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        0.1,
        momentum=0.9,
        weight_decay=0.1,
    )
    optimizer = hvd.DistributedOptimizer(optimizer, op=op)
    for _ in range(3):
        optimizer.zero_grad()
        used = [model[0]] + [model[1]] * (hvd.rank() == 0)
        sum(layer(torch.ones(1, 4)).sum() for layer in used).backward()
        optimizer.step()
    check_same_everywhere(model)
    for untouched in (model[2], model[3]):
        assert all(
            torch.equal(p, torch.full_like(p, 0.3)) for p in untouched.parameters()
        )
    for moved in (model[0], model[1]):
        assert not any(
            torch.equal(p, torch.full_like(p, 0.3)) for p in moved.parameters()
        )


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])
def case_unfreezing_later(op: str) -> None:
    """Fine-tuning: a layer that is unfrozen after the wrapping is reduced from then on."""
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = distributed(model, op)
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        check_same_everywhere(model)
    assert not torch.equal(model[0].weight, model_of()[0].weight)


@pytest.mark.parametrize("op", ("adasum-grad", "adasum-delta"))
def case_groups_compression_and_buckets(op: str) -> None:
    results = []
    settings = [{}, {"groups": 2}, {"bucket_bytes": 1}, {"start_copy": "host"}]
    first = None
    for kwargs in settings:
        model = model_of()
        if "groups" in kwargs:
            params = list(model.parameters())
            if op == "adasum-delta":
                kwargs = {"groups": [params[:2], params[3:]]}
        optimizer = distributed(model, op, **kwargs)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        first = results[-1] if not kwargs else first
        assert torch.equal(results[-1], first), "bucketing changed the result"
    for compression, rtol in (
        (hvd.Compression.fp16, 0.02),
        (hvd.Compression.bf16, 0.1),
    ):
        model = model_of()
        optimizer = distributed(model, op, compression=compression)
        before = hvd.counters().bytes
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
        check_same_everywhere(model)
        rounded = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(rounded, first, rtol=rtol, atol=rtol / 10)
        if hvd.size() > 1:
            assert not torch.equal(rounded, first)
            assert sum(optimizer.extra_bytes().values()) > 0
            travelled = hvd.counters().bytes - before
            assert 2 * 3 * rounded.numel() <= travelled < 2.1 * 3 * rounded.numel()


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float16"])
def case_low_precision(dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    for op in ("adasum-grad", "adasum-delta"):
        model = model_of().to(dtype)
        optimizer = distributed(model, op, lr=0.1)
        losses = []
        for step in range(8):
            optimizer.zero_grad()
            images, labels = batch_of(hvd.rank(), step % 2)
            loss = functional.cross_entropy(model(images.to(dtype)).float(), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all(p.dtype == dtype for p in model.parameters())
        digests = [p.detach().float() for p in model.parameters()]
        everyone = hvd.allgather_object([d.sum().item() for d in digests])
        assert all(e == everyone[0] for e in everyone)
        means = np.mean(hvd.allgather_object(losses), axis=0)
        assert means[-2:].mean() < means[:2].mean()


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("op", ["average", "sum", "adasum-grad", "adasum-delta"])
def case_sparse_gradients(op: str, dense: bool) -> None:
    """Average and Sum gather rows; AdaSum of gradients reduces densely, or refuses them."""
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, sparse=True)
    expected = copy.deepcopy(table.weight.detach())
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, op=op, sparse_as_dense=dense)
    if not dense and op == "adasum-grad" and hvd.size() > 1:
        with pytest.raises(
            ValueError, match=r"expected a dense gradient.*sparse_as_dense=True"
        ):
            table(torch.tensor([hvd.rank(), 5])).sum().backward()
        return
    for step in range(3):
        optimizer.zero_grad()
        used = torch.tensor([hvd.rank(), 5])
        if step == 1 and hvd.rank() == 0:  # no gradient here, rows elsewhere
            used = used[:0]
        table(used).sum().backward()
        optimizer.step()
        check_same_everywhere(table)
        assert table.weight.grad.is_sparse
        for r in range(hvd.size()):
            if step != 1 or r:
                scale = hvd.size() if op == "average" else 1
                expected[[r, 5]] -= 0.1 / scale
    if op in ("average", "sum"):
        torch.testing.assert_close(table.weight.detach(), expected)
    gathers = op in ("average", "sum") and not dense and hvd.size() > 1
    assert bool(getattr(optimizer._adasum, "_sparse", [])) == gathers
    if gathers:
        assert not optimizer._adasum.flat_buckets and table.weight.grad.is_sparse


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize("op", ["average", "sum", "max", "adasum-grad"])
@pytest.mark.parametrize("dense", [True, False])
def case_sparse_gradients_of_some_ranks(op: str, optimizer: str, dense: bool) -> None:
    """Gradients are of one layout on all ranks, and so is what the optimizer keeps of them."""
    if not dense and op not in ("average", "sum"):
        pytest.skip("is refused")
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(6, 3, sparse=True), nn.Embedding(5, 3)])
    more = {"momentum": 0.9} if optimizer == "SGD" else {}
    table = model if optimizer != "SparseAdam" else model[0]
    inner = getattr(torch.optim, optimizer)(table.parameters(), lr=0.1, **more)
    wrapped = hvd.DistributedOptimizer(inner, op=op, sparse_as_dense=dense)
    for step in range(4):
        wrapped.zero_grad()
        loss = model[1](torch.tensor([step])).sum()
        if hvd.rank() == step % hvd.size():
            loss = loss + model[0](torch.tensor([hvd.rank(), 5])).sum()
        loss.backward()
        wrapped.step()
        check_same_everywhere(model)
        assert model[0].weight.grad.is_sparse


def case_a_gradient_that_is_sparse_on_one_rank_is_sparse_on_all() -> None:
    """Optimizers round the two kinds differently."""
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), op=hvd.Sum)
    is_sparse = hvd.rank() == hvd.size() - 1
    functional.embedding(torch.tensor([0]), weight, sparse=is_sparse).sum().backward()
    optimizer.step()
    assert weight.grad.is_sparse


def case_an_id_that_is_used_again() -> None:
    """A parameter in the memory of another one that is gone does not get that one's name."""
    model, kept = nn.Linear(4, 4, bias=False), []
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op="average")
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        weight = nn.Parameter(model.weight.detach().clone())
        if hvd.rank():
            kept.append(torch.ones(4, 4))  # so that ids differ between ranks
        model.weight = optimizer.param_groups[0]["params"][0] = weight
    check_same_everywhere(model)


def case_sparse_and_dense() -> None:
    """Rows that one rank alone has at first: the same weights as with dense gradients."""
    trained = []
    for dense in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Embedding(6, 3, sparse=not dense) for _ in range(2)])
        model.append(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), op="average"
        )
        for step in range(4):
            optimizer.zero_grad()
            hidden = model[0](torch.tensor([step, hvd.rank()])).sum(0)
            if hvd.rank() == step % hvd.size():
                hidden = hidden + model[1](torch.tensor([hvd.rank()])).sum(0)
            model[2](hidden).square().sum().backward()
            optimizer.step()
            check_same_everywhere(model)
        trained.append(model)
    check_equal(trained[1], trained[0])


def case_worker_local() -> None:
    model = model_of()
    hvd.mark_worker_local(model[4].weight)
    optimizer = distributed(model, "adasum-delta")
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    weights = hvd.allgather_object(model[4].weight.detach().numpy())
    assert hvd.size() == 1 or not np.array_equal(weights[0], weights[1])
    rest = nn.ModuleList([model[0], model[2]])
    check_same_everywhere(rest)
    if hvd.size() > 1:
        hvd.mark_worker_local(*model.parameters())
        optimizer = distributed(model, "adasum-grad")
        loss_of(model, hvd.rank(), 0).backward()
        with pytest.raises(RuntimeError, match="replicas would diverge"):
            optimizer.step()


@pytest.mark.parametrize("op", ("adasum-grad", "average"))
def case_what_is_frozen_around_backward_loses_no_gradient(op: str) -> None:
    """A rank's own parameter, and one that is trained again before the step."""
    model = model_of()
    hvd.mark_worker_local(model[4].weight)
    optimizer = distributed(model, op)
    for changed, trained in ((model[4].weight, False), (model[2].bias, True)):
        optimizer.zero_grad()
        changed.requires_grad_(False)
        loss_of(model, hvd.rank(), 0).backward()
        changed.requires_grad_(trained)
        optimizer.step()
        assert model[0].weight.grad.any()


@pytest.mark.parametrize("op", ("adasum-grad", "adasum-delta"))
def case_conversion_after_wrapping(op: str) -> None:
    """Other dtypes and memory layouts than at construction: the buckets follow."""
    conversions = (
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.double(),
        lambda model: model.half(),
        lambda model: model.bfloat16(),
    )
    for convert in conversions:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 2)
        optimizer = distributed(model, op)
        convert(model)
        converted = copy.deepcopy(model)
        again = distributed(converted, op)
        for step in range(2):
            for net, each in ((model, optimizer), (converted, again)):
                torch.manual_seed(10 * step + hvd.rank())
                images = torch.randn(2, 3, 4, 4).to(net.weight.dtype)
                each.zero_grad()
                net(images).square().mean().backward()
                each.step()
        hvd.check_replicas(model)
        for one, other in zip(model.parameters(), converted.parameters(), strict=True):
            assert torch.equal(one, other)


def case_conversion_inside_a_step() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")

    class Converting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data = parameter.data.double()

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        Converting(model.parameters(), 0.1), op="adasum-delta"
    )
    model(torch.ones(1, 3)).sum().backward()
    converted = r"got one of shape \(2(, 3|,)\), torch\.float64, on cpu"
    with pytest.raises(RuntimeError, match=converted):
        optimizer.step()
