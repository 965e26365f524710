"""DDP with the hook that needs no Horovod: what `adasum_all_reduce` gives, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from adasum_hvd.distributed import (
    AdasumState,
    Compression,
    adasum_all_reduce,
    adasum_hook,
)
from tests.parallel.cases.distributed.test_all_reduce import align as align
from tests.parallel.cases.distributed.test_all_reduce import init as init
from tests.parallel.cases.distributed.test_all_reduce import rank as rank
from tests.parallel.cases.distributed.test_all_reduce import shutdown as shutdown
from tests.parallel.harness import ddp
from tests.parallel.harness.models import loss_of, model_of, sgd, weights


def reduce_gradients(
    model: nn.Module, group=None, compression: torch.dtype | None = None
) -> None:
    """Reduce every gradient by itself; one that some ranks lack is zero there."""
    for parameter in model.parameters():
        has = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(has, group=group)
        if not has:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        sent = parameter.grad.to(compression or parameter.dtype)
        adasum_all_reduce(sent, group)
        parameter.grad.copy_(sent)


def without_ddp(
    model: nn.Module,
    loss: Callable = loss_of,
    backward_passes_per_step: int = 1,
    **arguments,
) -> torch.Tensor:
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: reduce_gradients(model, **arguments))
    ddp.train(model, optimizer, loss, backward_passes_per_step)
    return weights(model)


ENGINE = ddp.Hooked(
    AdasumState, adasum_hook, Compression.fp16, Compression.bf16, without_ddp
)


def case_buckets() -> None:
    ddp.buckets(ENGINE)


def case_accumulation() -> None:
    ddp.accumulation(ENGINE)


def case_two_bytes_on_the_wire() -> None:
    ddp.two_bytes_on_the_wire(ENGINE)


def case_activation_checkpointing() -> None:
    ddp.activation_checkpointing(ENGINE)


def case_frozen_parameters() -> None:
    ddp.frozen_parameters(ENGINE)


def case_unused_parameters() -> None:
    ddp.unused_parameters(ENGINE)


def case_mixed_precision_with_an_overflow_on_one_rank() -> None:
    ddp.overflow_on_one_rank(ENGINE)


def case_join() -> None:
    ddp.join(ENGINE)


def case_dtypes() -> None:
    ddp.dtypes(ENGINE)


def case_several_models_in_one_backward_pass() -> None:
    ddp.several_models(ENGINE)


def case_process_group() -> None:
    if dist.get_world_size() < 3:
        pytest.skip("a group of some of the ranks needs 3 ranks")
    ranks = [0, 2]
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        expected = without_ddp(model_of(), group=group)
        ddp.some_ranks(ENGINE, ranks, AdasumState(group), expected, group)
    else:
        with pytest.raises(ValueError, match=r"a process group that this rank is in"):
            AdasumState(group)


def case_rules_and_groups() -> None:
    model = ENGINE.wrapped(model_of(), AdasumState(rule="mean"))
    ddp.train(model, sgd(model.parameters()))
    plain = nn.parallel.DistributedDataParallel(model_of())
    ddp.train(plain, sgd(plain.parameters()))
    torch.testing.assert_close(weights(model.module), weights(plain.module))
    everyone = AdasumState(group_op="average", group_size=dist.get_world_size())
    model = ENGINE.wrapped(model_of(), everyone)
    ddp.train(model, sgd(model.parameters()))
    torch.testing.assert_close(weights(model.module), weights(plain.module))


def case_a_backward_pass_that_breaks_off() -> None:
    """The next one begins anew, and the pass after that gives what it would have given."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("breaks off")

    expected = without_ddp(model_of())
    model = model_of()
    wrapped = ENGINE.wrapped(model)
    first = model[0].register_forward_hook(
        lambda *arguments: Breaks.apply(arguments[2])
    )
    with pytest.raises(RuntimeError, match="breaks off"):
        loss_of(wrapped, rank(), 0).backward()
    first.remove()
    del wrapped
    ddp.check_bits(ENGINE.wrapped(model), expected)


def case_what_is_refused() -> None:
    odd = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(ValueError, match=r"expected Compression\.none, .*got 'fp8'"):
        AdasumState(compression="fp8")
    words = (
        r"AdasumState: expected the same arguments on all ranks, but got compression="
    )
    with pytest.raises(ValueError, match=words):
        AdasumState(compression=Compression.fp16 if odd else None)
    with pytest.raises(ValueError, match=r"but got rule=mean on rank"):
        AdasumState(rule="mean" if odd else "adasum")
    with pytest.raises(TypeError, match=r"a bucket of Distrib.*got Tensor; FSDP"):
        adasum_hook(AdasumState(), torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = ENGINE.wrapped(ddp.Rows())
        with pytest.raises(
            ValueError, match="adasum_hook: expected dense tensors, but"
        ):
            rows(torch.arange(3)).sum().backward()
    ddp.check_bits(ENGINE.wrapped(model_of()), without_ddp(model_of()))
