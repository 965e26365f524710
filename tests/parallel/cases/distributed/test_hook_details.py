"""DDP's hook that needs no Horovod: its warnings, its monitor's figures and its passes."""

from __future__ import annotations

import copy
import gc
import os
import time
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd import reference
from adasum_hvd.distributed import (
    AdasumMonitor,
    AdasumState,
    LocalSGD,
    adasum_hook,
    adasum_replicate,
)
from tests.parallel.cases.distributed.test_all_reduce import HOSTS
from tests.parallel.cases.distributed.test_all_reduce import align as align
from tests.parallel.cases.distributed.test_all_reduce import init as init
from tests.parallel.cases.distributed.test_all_reduce import rank as rank
from tests.parallel.cases.distributed.test_all_reduce import shutdown as shutdown
from tests.parallel.cases.distributed.test_hook import ENGINE, check_record, gradients
from tests.parallel.harness import ddp
from tests.parallel.harness.models import loss_of, model_of, sgd
from tests.parallel.harness.processes import (
    descriptors,
    settled,
    shared_mappings,
    until,
)


def with_state(**arguments) -> None:
    AdasumState(**arguments)


def with_replicate(**arguments) -> None:
    adasum_replicate(nn.Linear(3, 2), dist.group.WORLD, **arguments)


def with_local_sgd(**arguments) -> None:
    model = nn.Linear(3, 2)
    LocalSGD(sgd(model.parameters()), model, dist.group.WORLD, 2, **arguments)


@pytest.mark.parametrize("name", ["state", "replicate", "local_sgd"])
def case_one_group_of_all_ranks(name: str) -> None:
    """It leaves AdaSum nothing to combine: one warning, on the first rank."""
    size = dist.get_world_size()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        globals()[f"with_{name}"](group_op="average", group_size=size)
    texts = [str(each.message) for each in found]
    assert [f"one group of all {size} ranks" in text for text in texts] == [True] * (
        rank() == 0
    )


def trained(
    state: AdasumState, every: int, steps: int, scaler: torch.amp.GradScaler | None
) -> tuple[list[dict], list[dict[str, list[np.ndarray]]]]:
    """Train with a monitor from the third step on, whose buckets are the final ones.

    Returns:
        The records, and all ranks' gradients of the monitored steps.
    """
    scaling = scaler or torch.amp.GradScaler("cpu", enabled=False)
    records: list[dict] = []
    vectors, monitor, model = [], None, model_of()
    wrapped = ENGINE.wrapped(model, state)
    optimizer = sgd(wrapped.parameters())
    for step in range(2 + steps):
        if step == 2:
            monitor = AdasumMonitor(
                state, every, records.append, model.named_parameters(), scaler
            )
        if monitor:
            vectors.append(gradients(copy.deepcopy(model), step))
        optimizer.zero_grad()
        scaling.scale(loss_of(wrapped, rank(), step)).backward()
        scaling.step(optimizer)
        scaling.update()
    monitor.close()
    return records, vectors


def case_every_second_step_has_a_record() -> None:
    records, vectors = trained(AdasumState(), 2, 5, None)
    assert [record["step"] for record in records] == ([] if rank() else [2, 4])
    for record in records:
        check_record(record["tensors"], vectors[record["step"] - 1])


def case_every_is_the_same_on_all_ranks() -> None:
    state = AdasumState()
    with pytest.raises(ValueError, match=r"arguments of AdasumMonitor.*every=[12]"):
        AdasumMonitor(state, 2 if rank() % 2 else 1)
    assert not state._on_round


def case_a_scaler_does_not_change_figures() -> None:
    """Records are of unscaled gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plain, _ = trained(AdasumState(), 1, 3, None)
    scaled, _ = trained(AdasumState(), 1, 3, scaler)
    assert len(plain) == len(scaled) == (0 if rank() else 3)
    for one, other in zip(plain, scaled, strict=True):
        for name, tensor in one["tensors"].items():
            for key in ("variance", "squared_mean", "length"):
                found = other["tensors"][name][key]
                assert found == pytest.approx(tensor[key], rel=1e-5), (name, key)


def case_records_of_averaged_groups() -> None:
    """The figures are those of the groups' means, which AdaSum joins."""
    state = AdasumState(group_op="average", group_size=2)
    records, vectors = trained(state, 1, 2, None)
    assert len(records) == (0 if rank() else 2)
    groups = reference.groups_of(HOSTS, 2)
    for record in records:
        for name, several in vectors[record["step"] - 1].items():
            means = np.stack(
                [np.mean([several[k] for k in group], 0).ravel() for group in groups]
            ).astype(np.float64)
            count, found = len(means), record["tensors"][name]
            if count < 2:  # nothing is joined
                assert found["length"] is found["variance"] is None
                continue
            length = np.linalg.norm(reference.adasum(several, HOSTS, "average", 2))
            correct = {
                "length": length,
                "variance": means.var(0, ddof=1).sum(),
                "gain": length / np.linalg.norm(means.mean(0)),
            }
            for key, value in correct.items():
                assert found[key] == pytest.approx(value, rel=1e-5), (name, key)


def case_steps_after_a_monitor_is_closed() -> None:
    """It leaves the state, and writes nothing more."""
    state, records = AdasumState(), []
    model = model_of()
    wrapped = ENGINE.wrapped(model, state)
    monitor = AdasumMonitor(state, 1, records.append, model.named_parameters())
    ddp.train(wrapped, sgd(wrapped.parameters()))
    monitor.close()
    before = list(records)
    ddp.train(wrapped, sgd(wrapped.parameters()))
    assert bool(before) == (rank() == 0)
    assert records == before and state._on_round == []


@pytest.mark.parametrize("views", [False, True])
def case_versions_show_reductions(views: bool) -> None:
    """AdamOffload copies a gradient again if its version has changed since its early copy."""
    model = nn.Linear(3, 2, bias=False)
    wrapped = ENGINE.wrapped(model, gradient_as_bucket_view=views)
    changes: list[int] = []
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        seen: list[int] = []
        handle = model.weight.register_post_accumulate_grad_hook(
            lambda parameter, seen=seen: seen.append(parameter.grad._version)
        )
        (wrapped(torch.ones(1, 3)) * (1 + rank())).sum().backward()
        handle.remove()
        changes.append(model.weight.grad._version - seen[0])
    assert all(change > 0 for change in changes)


def case_memory_of_buckets_goes_with_the_model() -> None:
    has_core = os.environ.get("ADASUM_HVD_CORE") != "off"
    gc.collect()
    for _ in range(2):
        before = settled(shared_mappings)  # without those of earlier cases' lanes
        state = AdasumState()
        wrapped = ENGINE.wrapped(nn.Linear(200, 200), state)
        for _ in range(3):
            wrapped(torch.ones(1, 200)).sum().backward()
        assert (shared_mappings() > before) == has_core
        assert bool(state._shared._storages) == has_core
        del wrapped, state
        gc.collect()
        # A thread of the lane closes its own.
        until(lambda before=before: shared_mappings() <= before, 20)


def case_one_rank_whose_buckets_cannot_be_shared() -> None:
    """It copies them, and the results are the same."""
    if os.environ.get("ADASUM_HVD_CORE") == "off":
        pytest.skip("torch's operations share no memory")
    found = []
    for short in (False, rank() == 0):
        torch.manual_seed(0)
        model = nn.Linear(400, 100)
        wrapped = ENGINE.wrapped(model, AdasumState())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                wrapped.zero_grad()
                with descriptors(0) if short and step else nullcontext():
                    wrapped(torch.full((1, 400), 1.0 + rank() + step)).sum().backward()
        texts = [str(each.message) for each in caught]
        assert any("memory that the ranks share" in text for text in texts) == short
        found.append(model.weight.grad)
    assert torch.equal(*found)


def case_sparse_gradients_are_refused_on_all_ranks() -> None:
    """Also on a rank that has reduced an earlier bucket of the pass by then."""

    def wait(gradient: torch.Tensor) -> None:
        time.sleep(0.3 * (rank() == 1))

    words, layer = nn.Embedding(30, 400, sparse=True), nn.Linear(400, 400)
    words.register_forward_hook(lambda *of: of[-1].register_hook(wait) and None)
    model = DistributedDataParallel(nn.Sequential(words, layer), bucket_cap_mb=0.001)
    model.register_comm_hook(AdasumState(), adasum_hook)
    with pytest.raises(ValueError, match=r"expected dense tensors, but got one that"):
        model(torch.arange(3)).sum().backward()


def case_buckets_of_a_wrapper_are_not_kept() -> None:
    """They are new in each pass, and would fill the memory."""
    model, state = nn.Linear(200, 200), AdasumState()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, fp16_compress_wrapper(adasum_hook))
    for number in range(4):
        wrapped(torch.full((1, 200), float(number + 1))).sum().backward()
        model.zero_grad()
    assert not state._shared._storages


def case_means_of_sums_are_sums_of_means() -> None:
    """Under `rule="mean"` a pass may add to reduced gradients, and nothing warns."""
    model = nn.Linear(3, 2)
    wrapped = ENGINE.wrapped(model, AdasumState(rule="mean"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            (wrapped(torch.ones(1, 3)) * (1 + rank())).sum().backward()
    mean = (1 + dist.get_world_size()) / 2
    torch.testing.assert_close(model.bias.grad, torch.full((2,), 2 * mean))
