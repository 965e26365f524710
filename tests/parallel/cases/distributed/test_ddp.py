"""DDP with AdaSum's hooks, under torchrun: what the distributed optimizer gives, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import adasum_hvd.torch as hvd
from adasum_hvd.torch.ddp import AdasumState, adasum_hook, keep_local_hook
from tests.parallel.harness.torch_training import (
    check_same_everywhere,
    loss_of,
    model_of,
    sgd,
    weights,
)

STEPS = 4  # buckets are built anew after the first
SMALL_BUCKETS = {"bucket_cap_mb": 0.004}  # several, and one has several parameters


def init() -> None:
    """Begin as most scripts do: the process group first; Horovod takes the ranks from it."""
    dist.init_process_group("gloo")
    hvd.init()


def align() -> None:
    dist.barrier()


def wrapped(
    model: nn.Module,
    state: AdasumState | None = None,
    hook: Callable = adasum_hook,
    **options,
) -> DistributedDataParallel:
    """Return the model in DDP with a hook."""
    ddp = DistributedDataParallel(model, **(SMALL_BUCKETS | options))
    ddp.register_comm_hook(state or AdasumState(), hook)
    return ddp


def train(
    model: nn.Module, optimizer, loss: Callable = loss_of, passes: int = 1
) -> None:
    """Train a few steps; of several passes DDP reduces in the last one only."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            last = number == passes - 1 or not hasattr(model, "no_sync")
            with nullcontext() if last else model.no_sync():
                loss(model, hvd.rank(), passes * step + number).backward()
        optimizer.step()


def by_optimizer(model: nn.Module, loss: Callable = loss_of, **options) -> torch.Tensor:
    """Return the weights that the distributed optimizer comes to."""
    options = {"op": hvd.AdasumGrad, **options}
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), **options
    )
    train(model, optimizer, loss, options.get("backward_passes_per_step", 1))
    return weights(model)


def case_monitor_of_the_hook() -> None:
    """It records what the optimizer's does, by the parameters' names, also in new buckets."""
    of_hook: list = []
    of_optimizer: list = []
    model = model_of()
    plain = copy.deepcopy(model)
    state = AdasumState()
    ddp = wrapped(model, state)
    monitor = hvd.AdasumMonitor(state, 1, of_hook.append, model.named_parameters())
    train(ddp, sgd(ddp.parameters()))
    monitor.close()
    optimizer = hvd.DistributedOptimizer(
        sgd(plain.parameters()), plain.named_parameters(), op=hvd.AdasumGrad
    )
    monitor = hvd.AdasumMonitor(optimizer, 1, of_optimizer.append)
    train(plain, optimizer)
    monitor.close()
    assert torch.equal(weights(ddp.module), weights(plain))
    if hvd.rank():
        assert not of_hook and not of_optimizer
        return
    by_step = {record["step"]: record["tensors"] for record in of_optimizer}
    assert list(by_step) == [1, 2, 3, 4]
    # Which buckets there are shows in the first step, and others come after it.
    assert [record["step"] for record in of_hook] == [3, 4]
    for record in of_hook:
        assert record["tensors"] == by_step[record["step"]]


def check_bits(
    ddp: DistributedDataParallel,
    expected: torch.Tensor,
    loss: Callable = loss_of,
    passes=1,
) -> None:
    """Check that DDP and a plain optimizer come to these weights, on all ranks."""
    train(ddp, sgd(ddp.parameters()), loss, passes)
    assert torch.equal(weights(ddp.module), expected)
    check_same_everywhere(ddp.module)


def case_the_optimizers_bits() -> None:
    expected = by_optimizer(model_of())
    assert not torch.equal(expected, weights(model_of()))
    before = hvd.counters()
    for options in (
        {},
        {"bucket_cap_mb": 25},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        check_bits(wrapped(model_of(), **options), expected)
    after = hvd.counters()
    # Six parameters with coefficients of their own, in fewer calls, step by step.
    assert after.tensors - before.tensors == 5 * STEPS * 6
    assert after.calls - before.calls < after.tensors - before.tensors


def case_accumulation() -> None:
    expected = by_optimizer(model_of(), backward_passes_per_step=2)
    check_bits(wrapped(model_of()), expected, passes=2)


def case_two_bytes_on_the_wire() -> None:
    for compression, wrapper in (
        (hvd.Compression.fp16, default_hooks.fp16_compress_wrapper),
        (hvd.Compression.bf16, default_hooks.bf16_compress_wrapper),
    ):
        expected = by_optimizer(model_of(), compression=compression)
        check_bits(wrapped(model_of(), AdasumState(compression=compression)), expected)
        hook = wrapper(adasum_hook)
        hook.__name__ = "wrapped"  # by which torch knows hooks that Gloo cannot run
        check_bits(wrapped(model_of(), hook=hook), expected)


class Checkpointed(nn.Module):
    """Recomputes its layers in backward."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.layers, self.reentrant = model_of(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if self.reentrant else x
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


def case_activation_checkpointing() -> None:
    expected = by_optimizer(model_of())
    for reentrant in (False, True):
        # torch's own rule for checkpoints that call backward inside of backward.
        ddp = wrapped(Checkpointed(reentrant), static_graph=reentrant)
        check_bits(ddp, expected)


def case_frozen_parameters() -> None:
    models = [model_of(), model_of()]
    for model in models:
        model[2].requires_grad_(False)
    check_bits(wrapped(models[0]), by_optimizer(models[1]))


def one_branch(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Use the first layer only on odd ranks."""
    if rank % 2 == 0:
        return loss_of(model, rank, step)
    images = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
    return model(images, short=True).square().mean()


class Branching(nn.Module):
    """May leave layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model_of()
        self.unused = nn.Parameter(torch.ones(3))  # on all ranks

    def forward(self, x: torch.Tensor, short: bool = False) -> torch.Tensor:
        return self.layers[0](x) if short else self.layers(x)


def case_unused_parameters() -> None:
    expected = by_optimizer(Branching(), one_branch)
    ddp = wrapped(Branching(), find_unused_parameters=True)
    check_bits(ddp, expected, one_branch)
    assert ddp.module.unused.grad is None


def case_mixed_precision_with_an_overflow_on_one_rank() -> None:
    def scaled(model: nn.Module, optimizer, scaler) -> torch.Tensor:
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, hvd.rank(), step)
            if step == 1 and hvd.rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9  # halved once, on every rank
        return weights(model)

    plain, ddp = model_of(), wrapped(model_of())
    optimizer = hvd.DistributedOptimizer(
        sgd(plain.parameters()), plain.named_parameters(), op=hvd.AdasumGrad
    )
    expected = scaled(plain, optimizer, hvd.GradScaler("cpu", init_scale=2.0**10))
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert torch.equal(scaled(ddp, sgd(ddp.parameters()), torchs), expected)
    assert torch.isfinite(expected).all()
    check_same_everywhere(ddp.module)


def case_join() -> None:
    """Ranks with fewer batches count as zero, which is neutral."""

    def zero_when_out(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return loss_of(model, rank, step) * (step < STEPS - rank)

    expected = by_optimizer(model_of(), zero_when_out)
    ddp = wrapped(model_of())
    optimizer = sgd(ddp.parameters())
    with ddp.join():
        for step in range(STEPS - hvd.rank()):
            optimizer.zero_grad()
            loss_of(ddp, hvd.rank(), step).backward()
            optimizer.step()
    # Who joins last has the weights; DDP gives them to the others.
    assert torch.equal(weights(ddp.module), expected)
    check_same_everywhere(ddp.module)


def case_delta_variant() -> None:
    expected = by_optimizer(model_of(), op=hvd.AdasumDelta)
    ddp = wrapped(model_of(), hook=keep_local_hook)
    optimizer = hvd.DistributedOptimizer(
        sgd(ddp.parameters()), ddp.named_parameters(), op=hvd.AdasumDelta, model=ddp
    )
    train(ddp, optimizer)
    assert torch.equal(weights(ddp.module), expected)
    plain = DistributedDataParallel(model_of())
    optimizer = hvd.DistributedOptimizer(
        sgd(plain.parameters()), plain.named_parameters(), op=hvd.AdasumDelta
    )
    with plain.no_sync():
        train(plain.module, optimizer)
    assert torch.equal(weights(plain.module), expected)


def case_dtypes() -> None:
    for dtype in (torch.float64, torch.float16):
        model = model_of().to(dtype)

        def loss(model: nn.Module, rank: int, step: int, dtype=dtype) -> torch.Tensor:
            generator = torch.Generator().manual_seed(100 * step + rank)
            images = torch.randn(8, 12, generator=generator).to(dtype)
            return model(images).float().square().mean()

        expected = by_optimizer(copy.deepcopy(model), loss)
        check_bits(wrapped(copy.deepcopy(model)), expected, loss)


def case_several_models_in_one_backward_pass() -> None:
    models = [model_of(seed) for seed in (1, 2)]
    expected = [by_optimizer(copy.deepcopy(model)) for model in models]
    ddps = [wrapped(model) for model in models]
    optimizers = [sgd(ddp.parameters()) for ddp in ddps]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(ddp, hvd.rank(), step) for ddp in ddps).backward()
        for optimizer in optimizers:
            optimizer.step()
    for ddp, found in zip(ddps, expected, strict=True):
        assert torch.equal(weights(ddp.module), found)


def case_process_set() -> None:
    if hvd.size() < 3:
        pytest.skip("a group of some of the ranks needs 3 ranks")
    ranks = [0, 2]
    process_set, group = hvd.add_process_set(ranks), dist.new_group(ranks)
    if hvd.rank() in ranks:
        expected = by_optimizer(model_of(), process_set=process_set)
        state = AdasumState(process_set=process_set)
        ddp = wrapped(model_of(), state, process_group=group)
        train(ddp, sgd(ddp.parameters()))
        assert torch.equal(weights(ddp.module), expected)
    else:
        with pytest.raises(
            ValueError, match=r"a process set that includes this rank.*rank 1"
        ):
            AdasumState(process_set=process_set)
    dist.barrier()
    hvd.remove_process_set(process_set)
    with pytest.raises(ValueError, match="set HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        AdasumState(process_set=hvd.ProcessSet(ranks))


class Rows(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table(rows)


def case_what_is_refused() -> None:
    ddp = wrapped(model_of())
    for op in (hvd.AdasumGrad, hvd.AdasumDelta):
        with pytest.raises(
            RuntimeError, match=r"register_comm_hook\(AdasumState\(\), adasum"
        ):
            hvd.DistributedOptimizer(sgd(ddp.parameters()), op=op, model=ddp)
    with pytest.raises(
        NotImplementedError, match=r"expected Compression\.none, .*got 'fp8'"
    ):
        AdasumState(compression="fp8")
    words = r"the same arguments of AdasumState on all ranks, but got compression=NoneCompressor on"
    with pytest.raises(ValueError, match=words):
        AdasumState(compression=None if hvd.rank() else hvd.Compression.fp16)
    with pytest.raises(
        TypeError, match=r"expected a bucket of Distrib.*got Tensor; FSDP"
    ):
        adasum_hook(AdasumState(), torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = wrapped(Rows())
        with pytest.raises(
            ValueError, match="AdasumGrad expected a dense tensor, but got one of"
        ):
            rows(torch.arange(3)).sum().backward()
    check_bits(wrapped(model_of()), by_optimizer(model_of()))  # and the next one works


def case_an_optimizer_over_ddp_that_reduces() -> None:
    for op in ("average", "adasum-grad", "adasum-delta"):
        for allows in ({}, {"allow_modes": ["ddp"]}):
            model = model_of()
            ddp = DistributedDataParallel(model)
            optimizer = hvd.DistributedOptimizer(
                sgd(model.parameters()), model.named_parameters(), op=op, **allows
            )
            with ddp.no_sync():
                loss_of(ddp, hvd.rank(), 0).backward()
            optimizer.step()
            del optimizer
            optimizer = hvd.DistributedOptimizer(
                sgd(model.parameters()), op=op, **allows
            )
            optimizer.zero_grad()
            loss_of(ddp, hvd.rank(), 1).backward()
            if not allows:
                with pytest.raises(
                    RuntimeError, match="DistributedDataParallel has reduced"
                ):
                    optimizer.step()
            elif op == "adasum-delta":
                optimizer.step()
                check_same_everywhere(model)
            optimizer.zero_grad()
            del ddp, optimizer
