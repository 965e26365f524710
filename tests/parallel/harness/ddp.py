"""The cases of a DDP communication hook, for both engines.

A file of cases describes its hook once and runs the functions that CHECKS names. The hook's results
are compared bit for bit with those of the engine without DDP.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.parallel.harness.conformance import digest_of
from tests.parallel.harness.models import loss_of, model_of, sgd, weights

CHECKS = (
    "buckets",
    "accumulation",
    "accumulation_of_reduced_gradients",
    "two_bytes_on_the_wire",
    "activation_checkpointing",
    "frozen_parameters",
    "unused_parameters",
    "join",
    "dtypes",
    "several_models",
)
STEPS = 4  # buckets are built anew after the first
SMALL_BUCKETS = {"bucket_cap_mb": 0.004}  # several, and one has several parameters


@dataclass(frozen=True)
class Hooked:
    """An engine's hook, and how the engine trains without DDP."""

    state: Callable[..., Any]
    hook: Callable
    fp16: Any  # what compresses, as an argument of both
    bf16: Any
    # Of a model, a loss and options of an optimizer; returns the weights after STEPS steps.
    without_ddp: Callable[..., torch.Tensor]

    def wrapped(
        self, model: nn.Module, state: Any = None, hook: Any = None, **options: Any
    ) -> DistributedDataParallel:
        """Return the model in DDP with the hook."""
        ddp = DistributedDataParallel(model, **(SMALL_BUCKETS | options))
        ddp.register_comm_hook(state or self.state(), hook or self.hook)
        return ddp


def check_same_everywhere(model: nn.Module) -> None:
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest_of(model.state_dict().values()))
    assert len(set(digests)) == 1, "replicas diverge"


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable = loss_of,
    passes: int = 1,
) -> None:
    """Train a few steps; of several passes DDP reduces in the last one only."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            last = number == passes - 1 or not hasattr(model, "no_sync")
            with nullcontext() if last else model.no_sync():
                loss(model, dist.get_rank(), passes * step + number).backward()
        optimizer.step()


def check_bits(
    ddp: DistributedDataParallel,
    expected: torch.Tensor,
    loss: Callable = loss_of,
    passes: int = 1,
) -> None:
    """Check that DDP and a plain optimizer come to these weights, on all ranks."""
    train(ddp, sgd(ddp.parameters()), loss, passes)
    assert torch.equal(weights(ddp.module), expected)
    check_same_everywhere(ddp.module)


def buckets(engine: Hooked) -> None:
    expected = engine.without_ddp(model_of())
    assert not torch.equal(expected, weights(model_of()))
    for options in (
        {},
        {"bucket_cap_mb": 25},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        check_bits(engine.wrapped(model_of(), **options), expected)


def accumulation(engine: Hooked) -> None:
    expected = engine.without_ddp(model_of(), backward_passes_per_step=2)
    check_bits(engine.wrapped(model_of()), expected, passes=2)


def accumulation_of_reduced_gradients(engine: Hooked) -> None:
    """A pass that adds to reduced gradients warns once; zeroed in place, they are new ones."""
    if dist.get_world_size() == 1:
        return
    for options in ({}, {"static_graph": True}):
        model = model_of()
        ddp = engine.wrapped(model, **options)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for set_to_none in (True, True, False, False):
                loss_of(ddp, dist.get_rank(), 0).backward()
                found.append([p.grad.clone() for p in model.parameters()])
                ddp.zero_grad(set_to_none=set_to_none)
            # A rank that has run out of data has clipped the gradients of its last pass.
            with ddp.join():
                for _ in range(1 + dist.get_rank()):
                    ddp.zero_grad()
                    loss_of(ddp, dist.get_rank(), 0).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            ddp.zero_grad()
        for gradients in found[1:]:
            for one, other in zip(found[0], gradients, strict=True):
                assert torch.equal(one, other)
        loss_of(ddp, dist.get_rank(), 0).backward()
        with pytest.warns(
            UserWarning, match=r"added to the reduced gradients.*no_sync"
        ):
            loss_of(ddp, dist.get_rank(), 0).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(ddp, dist.get_rank(), 0).backward()


def two_bytes_on_the_wire(engine: Hooked) -> None:
    for compression, wrapper in (
        (engine.fp16, default_hooks.fp16_compress_wrapper),
        (engine.bf16, default_hooks.bf16_compress_wrapper),
    ):
        expected = engine.without_ddp(model_of(), compression=compression)
        state = engine.state(compression=compression)
        check_bits(engine.wrapped(model_of(), state), expected)
        hook = wrapper(engine.hook)
        hook.__name__ = "wrapped"  # by which torch knows hooks that Gloo cannot run
        check_bits(engine.wrapped(model_of(), hook=hook), expected)


class Checkpointed(nn.Module):
    """Recomputes its layers in backward."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.layers, self.reentrant = model_of(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if self.reentrant else x
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


def activation_checkpointing(engine: Hooked) -> None:
    expected = engine.without_ddp(model_of())
    for reentrant in (False, True):
        # torch's own rule for checkpoints that call backward inside of backward.
        ddp = engine.wrapped(Checkpointed(reentrant), static_graph=reentrant)
        check_bits(ddp, expected)


def frozen_parameters(engine: Hooked) -> None:
    models = [model_of(), model_of()]
    for model in models:
        model[2].requires_grad_(False)
    check_bits(engine.wrapped(models[0]), engine.without_ddp(models[1]))


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


def unused_parameters(engine: Hooked) -> None:
    expected = engine.without_ddp(Branching(), one_branch)
    ddp = engine.wrapped(Branching(), find_unused_parameters=True)
    check_bits(ddp, expected, one_branch)
    assert ddp.module.unused.grad is None


def train_scaled(model: nn.Module, optimizer, scaler) -> torch.Tensor:
    """Train with a scaler and an overflow on rank 1; return the weights."""
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, dist.get_rank(), step)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9  # halved once, on every rank
    assert torch.isfinite(weights(model)).all()
    return weights(model)


def overflow_on_one_rank(engine: Hooked) -> torch.Tensor:
    """Return the weights after training in mixed precision with DDP."""
    ddp = engine.wrapped(model_of())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = train_scaled(ddp, sgd(ddp.parameters()), scaler)
    check_same_everywhere(ddp.module)
    return found


def join(engine: Hooked) -> None:
    """Ranks with fewer batches count as zero, which is neutral."""

    def zero_when_out(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return loss_of(model, rank, step) * (step < STEPS - rank)

    expected = engine.without_ddp(model_of(), zero_when_out)
    ddp = engine.wrapped(model_of())
    optimizer = sgd(ddp.parameters())
    with ddp.join():
        for step in range(STEPS - dist.get_rank()):
            optimizer.zero_grad()
            loss_of(ddp, dist.get_rank(), step).backward()
            optimizer.step()
    # The rank that joins last has the weights; DDP gives them to the others.
    assert torch.equal(weights(ddp.module), expected)
    check_same_everywhere(ddp.module)


def dtypes(engine: Hooked) -> None:
    for dtype in (torch.float64, torch.float16):
        model = model_of().to(dtype)

        def loss(model: nn.Module, rank: int, step: int, dtype=dtype) -> torch.Tensor:
            generator = torch.Generator().manual_seed(100 * step + rank)
            images = torch.randn(8, 12, generator=generator).to(dtype)
            return model(images).float().square().mean()

        expected = engine.without_ddp(copy.deepcopy(model), loss)
        check_bits(engine.wrapped(copy.deepcopy(model)), expected, loss)


def several_models(engine: Hooked) -> None:
    """Two models in one backward pass."""
    models = [model_of(seed) for seed in (1, 2)]
    expected = [engine.without_ddp(copy.deepcopy(model)) for model in models]
    ddps = [engine.wrapped(model) for model in models]
    optimizers = [sgd(ddp.parameters()) for ddp in ddps]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(ddp, dist.get_rank(), step) for ddp in ddps).backward()
        for optimizer in optimizers:
            optimizer.step()
    for ddp, found in zip(ddps, expected, strict=True):
        assert torch.equal(weights(ddp.module), found)


def some_ranks(
    engine: Hooked, ranks: Sequence[int], state: Any, expected: torch.Tensor, group: Any
) -> None:
    """A process group of some of the ranks; called by these."""
    assert dist.get_rank() in ranks
    ddp = engine.wrapped(model_of(), state, process_group=group)
    train(ddp, sgd(ddp.parameters()))
    assert torch.equal(weights(ddp.module), expected)


class Rows(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table(rows)
