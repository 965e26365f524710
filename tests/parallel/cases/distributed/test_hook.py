"""DDP with the hook that needs no Horovod: what `adasum_all_reduce` gives, bit for bit."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import re
import time
import warnings
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_wrapper,
)

from adasum_hvd.distributed import (
    AdasumMonitor,
    AdasumState,
    Compression,
    ReplicaMismatch,
    adasum_all_reduce,
    adasum_hook,
    adasum_lr,
    banner,
    check_replicas,
    mark_worker_local,
    register_adasum_hook,
)
from adasum_hvd.distributed.reduction import reduce_buffer
from tests.parallel.cases.distributed.test_all_reduce import HOSTS
from tests.parallel.cases.distributed.test_all_reduce import align as align
from tests.parallel.cases.distributed.test_all_reduce import init as init
from tests.parallel.cases.distributed.test_all_reduce import rank as rank
from tests.parallel.cases.distributed.test_all_reduce import shutdown as shutdown
from tests.parallel.harness import ddp, expected_records, noise
from tests.parallel.harness.ddp import CHECKS
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


@pytest.mark.parametrize("check", CHECKS)
def case_hook(check: str) -> None:
    getattr(ddp, check)(ENGINE)


def case_mixed_precision_with_an_overflow_on_one_rank() -> None:
    ddp.overflow_on_one_rank(ENGINE)


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


def case_a_state_for_other_ranks_than_ddps() -> None:
    ranks = [*range(dist.get_world_size())]
    alone = [dist.new_group([each]) for each in ranks][rank()]
    for group, other, words, hook in (
        (alone, None, f"group, [0], but got a state for {ranks}", adasum_hook),
        (alone, None, "group, [0], but", fp16_compress_wrapper(adasum_hook)),
        (None, alone, f"group, {ranks}, but got a state for [{rank()}]", adasum_hook),
    ):
        wrapped = nn.parallel.DistributedDataParallel(model_of(), process_group=group)
        wrapped.register_comm_hook(AdasumState(other), hook)
        with pytest.raises(ValueError, match=re.escape(words)):
            loss_of(wrapped, rank(), 0).backward()
    # A program's own hook may reduce over the other ranks itself.
    wrapped = nn.parallel.DistributedDataParallel(model_of())
    wrapped.register_comm_hook(
        AdasumState(alone), lambda state, bucket: adasum_hook(state, bucket)
    )
    loss_of(wrapped, rank(), 0).backward()


def case_rules_and_groups() -> None:
    model = ENGINE.wrapped(model_of(), AdasumState(rule="mean"))
    ddp.train(model, sgd(model.parameters()))
    plain = nn.parallel.DistributedDataParallel(model_of())
    ddp.train(plain, sgd(plain.parameters()))
    torch.testing.assert_close(weights(model.module), weights(plain.module))
    everyone = AdasumState(group_op="average", group_size=dist.get_world_size())
    records: list[dict] = []
    model = ENGINE.wrapped(model_of(), everyone)
    monitor = AdasumMonitor(everyone, 1, records.append)
    ddp.train(model, sgd(model.parameters()))
    monitor.close()
    assert [record["joined"] for record in records] == ([] if rank() else [1, 1])
    torch.testing.assert_close(weights(model.module), weights(plain.module))


class Breaks(torch.autograd.Function):
    """Does nothing in forward, and raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("breaks off")


def case_a_backward_pass_that_breaks_off() -> None:
    """The next one waits for its buckets and begins anew, as if it had not been.

    DDP refuses to go on, so that the model is wrapped anew, and keeps the hook's state.
    """
    expected = without_ddp(model_of())
    model, state = model_of(), AdasumState()
    wrapped = ENGINE.wrapped(model, state)
    for _ in range(2):  # builds the small buckets
        loss_of(wrapped, rank(), 0).backward()
        wrapped.zero_grad()
    first = model[0].register_forward_hook(
        lambda *arguments: Breaks.apply(arguments[2])
    )
    with mock.patch("adasum_hvd.distributed.ddp.reduce_buffer", slow_reduction):
        with pytest.raises(RuntimeError, match="breaks off"):
            loss_of(wrapped, rank(), 0).backward()
        first.remove()
        del wrapped
        left, wrapped = list(state._started), ENGINE.wrapped(model, state)
        assert left
        with mock.patch.object(state, "_start", wraps=state._start) as start:
            start.side_effect = lambda *_: _check_done(left)
            wrapped.zero_grad()
            loss_of(wrapped, rank(), 0).backward()
    assert start.called and len(state.reduced) == start.call_count
    ddp.check_bits(wrapped, expected)


def _check_done(futures: list) -> object:
    assert all(future.done() for future in futures)
    return mock.DEFAULT


def slow_reduction(*arguments) -> object:
    time.sleep(0.3)
    return reduce_buffer(*arguments)


def case_a_bucket_that_a_pass_does_not_use_is_no_accumulation() -> None:
    """Its zeroed gradients have been written once, as those that backward has added to."""
    model = nn.ModuleList([nn.Linear(300, 300), nn.Linear(300, 300)])
    model.forward = lambda x, last: model[1](model[0](x)) if last else model[0](x)
    wrapped = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=0.2, find_unused_parameters=True
    )
    wrapped.register_comm_hook(AdasumState(), adasum_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for last in (True, True, False, True):
            wrapped(torch.ones(1, 300), last).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    with pytest.warns(UserWarning, match="backward added to the reduced gradients"):
        for _ in range(2):
            wrapped(torch.ones(1, 300), False).sum().backward()


def gradients(model: nn.Module, step: int) -> dict[str, list[np.ndarray]]:
    """Return all ranks' gradients of a step, by the parameter's name."""
    found: dict[str, list[np.ndarray]] = {}
    for other in range(dist.get_world_size()):
        model.zero_grad()
        loss_of(model, other, step).backward()
        for name, parameter in model.named_parameters():
            found.setdefault(name, []).append(parameter.grad.numpy().copy())
    model.zero_grad()
    return found


def check_record(tensors: dict[str, dict], vectors: dict[str, list]) -> None:
    """Check a record against the vectors that AdaSum joined, in levels over even hosts."""
    sizes = [HOSTS.count(host) for host in dict.fromkeys(HOSTS)]
    in_levels = min(sizes) == max(sizes) > 1 < len(sizes)
    path = f"levels of {sizes[0]} x {len(sizes)} ranks" if in_levels else ""
    expected_records.check(tensors, vectors, HOSTS, path, 1e-5)


def case_monitor() -> None:
    """Records of the parameters by their names, and the same bits as without a monitor."""
    expected = without_ddp(model_of())
    records: list[dict] = []
    model, state = model_of(), AdasumState()
    wrapped = ENGINE.wrapped(model, state)
    monitor = AdasumMonitor(state, 1, records.append, model.named_parameters())
    optimizer = sgd(wrapped.parameters())
    vectors = []
    for step in range(ddp.STEPS):
        vectors.append(gradients(copy.deepcopy(model), step))
        optimizer.zero_grad()
        loss_of(wrapped, rank(), step).backward()
        optimizer.step()
    monitor.close()
    assert torch.equal(weights(model), expected)
    if rank():
        assert not records
        return
    # The buckets are known after the first step, and are others after it.
    assert [record["step"] for record in records] == [3, 4]
    for record in records:
        assert record["ranks"] == record["joined"] == dist.get_world_size()
        check_record(record["tensors"], vectors[record["step"] - 1])


def case_monitor_of_groups() -> None:
    records: list[dict] = []
    model, state = model_of(), AdasumState(group_op="average", group_size=2)
    monitor = AdasumMonitor(state, 2, records.append, model.named_parameters())
    wrapped = ENGINE.wrapped(model, state)
    ddp.train(wrapped, sgd(wrapped.parameters()))
    monitor.close()
    with pytest.raises(ValueError, match="every: "):
        AdasumMonitor(state, 0)
    with pytest.raises(ValueError, match=r"got rule='mean'"):
        AdasumMonitor(AdasumState(rule="mean"))
    with pytest.raises(TypeError, match="expected an AdasumState"):
        AdasumMonitor(model)
    groups = -(-dist.get_world_size() // 2)
    assert [record["step"] for record in records] == ([] if rank() else [3, 4])
    for record in records:
        assert record["joined"] == groups and len(record["tensors"]) == 6


def case_a_group_of_one_rank() -> None:
    """Its gradients stay, and it has no records; arguments are checked as on several ranks."""
    alone = dist.new_group([rank()], use_local_synchronization=True)
    model, plain, state = model_of(), model_of(), AdasumState(alone)
    with pytest.raises(ValueError, match="every: "):
        AdasumMonitor(state, 0)
    records: list[dict] = []
    monitor = AdasumMonitor(state, 1, records.append)
    wrapped = ENGINE.wrapped(model, state, process_group=alone)
    for one in (wrapped, plain):
        ddp.train(one, sgd(one.parameters()))
    monitor.close()
    assert torch.equal(weights(model), weights(plain)) and not records


def case_the_noise_scale_is_that_of_per_example_gradients() -> None:
    model, inputs, labels = noise.model_and_examples()
    state, records = AdasumState(), []
    wrapped = ENGINE.wrapped(model, state)
    monitor = AdasumMonitor(state, 1, records.append, model.named_parameters())
    for step in range(noise.steps(dist.get_world_size())):
        drawn = noise.draw(rank(), step)
        wrapped.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs[drawn]), labels[drawn]).backward()
    monitor.close()
    assert bool(records) == (rank() == 0 and dist.get_world_size() > 1)
    if records:
        assert records[0]["inputs"] == "gradients"
        noise.check(records, noise.direct_scale(model, inputs, labels))


def case_replicas_and_banner() -> None:
    state = AdasumState(compression=Compression.bf16)
    model = nn.Sequential(model_of(), nn.BatchNorm1d(3))
    wrapped = ENGINE.wrapped(model, state)
    optimizer = sgd(wrapped.parameters())
    loss_of(wrapped, rank(), 0).backward()
    optimizer.step()
    with pytest.raises(ReplicaMismatch, match=r"module\.1\.running_mean"):
        check_replicas(wrapped)
    mark_worker_local(*model.buffers())
    assert check_replicas(wrapped, optimizer)
    assert not check_replicas(wrapped, every=5)
    shift = float(rank() == dist.get_world_size() - 1)
    buffer = optimizer.state[model[0][0].bias]["momentum_buffer"]
    buffer[3] += shift
    words = r"another module\.0\.0\.bias\.momentum_buffer on ranks"
    with pytest.raises(ReplicaMismatch, match=words):
        check_replicas(wrapped, optimizer)
    assert check_replicas(wrapped)
    optimizer.add_param_group({"params": [torch.full((2,), shift)]})  # as of a loss
    words = r"another parameter of shape \(2,\) outside of the model on ranks"
    with pytest.raises(ReplicaMismatch, match=words):
        check_replicas(wrapped, optimizer)
    buffer[3] -= shift
    with torch.no_grad():
        model[0][0].bias[3] += shift
    with pytest.raises(ReplicaMismatch, match=r"module\.0\.0\.bias"):
        check_replicas(wrapped)
    assert "learning rate" not in banner(state)
    by_torch = os.environ.get("ADASUM_HVD_CORE") == "off"
    path = "torch's operations (ADASUM_HVD_CORE=off" if by_torch else "the core (levels"
    assert f"; reduced by {path}" in banner(state)
    rate = adasum_lr(1, "adasum-grad", dist.get_world_size(), optimizer="adamw")
    line = banner(state, torch.optim.AdamW)
    assert f"adamw: learning rate {rate.factor:.3g} times" in line
    assert "learning rate" not in banner(state, torch.optim.RMSprop)
    line = banner(state, optimizer)
    assert "momentum: learning rate" in line
    size, hosts = dist.get_world_size(), "2 hosts" if len(set(HOSTS)) > 1 else "1 host"
    assert (
        f"adasum-grad (gradient variant); {size} ranks on {hosts} over cpu:gloo" in line
    )
    assert "AdaSum all the way" in line and "; bfloat16 on the wire;" in line


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
    for state, got in ((None, "NoneType"), (AdasumState, "the class AdasumState")):
        with pytest.raises(
            TypeError, match=rf"of adasum_hvd\.distrib.*got {got}; call"
        ):
            adasum_hook(state, torch.ones(3))
    with pytest.raises(ValueError, match=r"group or a mesh of one dim.*got RedOpType"):
        adasum_all_reduce(torch.ones(3), dist.ReduceOp.SUM)
    with warnings.catch_warnings(record=True) as caught:  # a host is a group
        warnings.simplefilter("always")
        AdasumState(group_op="average")
    warned = ["one group of all" in str(one.message) for one in caught]
    assert warned == [True] * (dist.get_rank() == 0 and len(set(HOSTS)) == 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = ENGINE.wrapped(ddp.Rows())
        with pytest.raises(
            ValueError, match="adasum_hook: expected dense tensors, but"
        ):
            rows(torch.arange(3)).sum().backward()
    model = nn.Linear(3, 2).to(torch.complex64)
    # Before torch 2.9 DDP always broadcasts, and Gloo then takes no complex parameter.
    if "init_sync" in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
        wrapped = ENGINE.wrapped(model, init_sync=False)
        expected = r"got (a |torch\.)complex"  # torch 2.8 keeps the dtype
        with pytest.raises(ValueError, match=expected):
            wrapped(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
    marked = ENGINE.wrapped(nn.Linear(3, 2))
    mark_worker_local(marked.module.bias)
    with pytest.raises(
        ValueError, match=r"marked with mark_worker_local.* keep it in a"
    ):
        marked(torch.ones(1, 3)).sum().backward()
    offloaded = ENGINE.wrapped(nn.Linear(3, 2))
    for parameter in offloaded.module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda given: setattr(given, "data", torch.empty(0))
        )
    with pytest.raises(
        ValueError, match="the 8 elements of DDP's bucket, but got para"
    ):
        offloaded(torch.ones(1, 3)).sum().backward()
    for copy_of in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="AdasumState: expected no copy, because a"):
            copy_of(marked)
    ddp.check_bits(ENGINE.wrapped(model_of()), without_ddp(model_of()))


def case_a_bucket_of_nothing_does_not_stop_the_monitor() -> None:
    model = nn.Linear(3, 2)
    model.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
    wrapped = nn.parallel.DistributedDataParallel(model)
    state = AdasumState()
    wrapped.register_comm_hook(state, adasum_hook)
    records: list[dict] = []
    monitor = AdasumMonitor(state, 1, records.append, model.named_parameters())
    for _ in range(4):
        wrapped.zero_grad()
        (wrapped(torch.ones(1, 3)).sum() + model.empty.sum().float()).backward()
    monitor.close()
    assert len(records) >= 2 or dist.get_rank()
    assert all(set(each["tensors"]) == {"weight", "bias"} for each in records)


def case_arguments_of_a_partial_rule_are_compared() -> None:
    odd = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(ValueError, match=r"got rule=.*scaled\(by=2\)"):
        AdasumState(rule=functools.partial(scaled, by=2 if odd else 1))


def scaled(gram: torch.Tensor, by: int) -> torch.Tensor:
    return torch.full_like(gram[:, 0], by)


def case_a_trainers_model_is_reduced_over_its_own_group() -> None:
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    alone, plain = model_of(), model_of()
    wrapped = nn.parallel.DistributedDataParallel(alone, process_group=groups[rank()])
    state = register_adasum_hook(wrapped, process_group=None)
    assert state is not None and state.communicator.size == 1
    for model in (wrapped, plain):
        loss_of(model, rank(), 0).backward()
    for one, other in zip(alone.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def case_a_trainers_model_has_the_hook_once() -> None:
    wrapped = nn.parallel.DistributedDataParallel(model_of())
    state = register_adasum_hook(wrapped, compression=Compression.bf16)
    assert isinstance(state, AdasumState)
    assert register_adasum_hook(wrapped, compression=Compression.bf16) is state
    with pytest.raises(ValueError, match="expected the arguments of the first call"):
        register_adasum_hook(wrapped)
    other = nn.parallel.DistributedDataParallel(model_of())
    assert register_adasum_hook(other) is not state
    words = "expected a model of DistributedDataParallel, but got Sequential"
    with pytest.raises(TypeError, match=words):
        register_adasum_hook(model_of())
    reduced: list[None] = []
    state.on_round(lambda: reduced.append(None))
    loss_of(wrapped, rank(), 0).backward()
    assert len(reduced) == 1
