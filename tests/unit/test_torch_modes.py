"""Detection on torch's own objects, in a process group of one rank: parallel modes, ranks."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

from adasum_hvd.distributed import register_adasum_hook
from adasum_hvd.horovod.launch.launch_context import LaunchContext, LaunchError
from adasum_hvd.parallel.torch_modes import detect
from adasum_hvd.torch import launch

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def modes(*arguments, **options) -> list[str]:
    return [finding.mode for finding in detect(*arguments, **options)]


def test_plain():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    assert detect(model.parameters(), optimizer, model) == []


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1(use_orig_params):
    model = FullyShardedDataParallel(
        nn.Linear(3, 3), device_id=CPU, use_orig_params=use_orig_params
    )
    assert modes(model.parameters()) == ["fsdp1"]
    assert modes(model=nn.Sequential(model)) == ["fsdp1"]


def test_fsdp2():
    model = nn.Linear(3, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert modes(model.parameters()) == ["dtensor"]
    assert modes(model.parameters(), model=model) == ["fsdp2"]


def test_local_parts_on_a_mesh_of_one_rank():
    model = parallelize_module(
        nn.Linear(3, 3), init_device_mesh("cpu", (1,)), ColwiseParallel()
    )
    assert modes(model.parameters()) == ["dtensor"]
    _pre_dp_module_transform(model)
    assert modes(model.parameters()) == []


def test_zero_redundancy():
    model = nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    assert modes(model.parameters(), optimizer) == ["zero_redundancy"]


def test_pipeline():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    stage = PipelineStage(model[0], 0, 2, CPU)
    (finding,) = detect(model[0].parameters(), model=stage)
    assert (finding.mode, finding.stages) == ("pipeline", 2)
    assert modes(model=PipelineStage(model, 0, 1, CPU)) == []
    split = {"1": SplitPoint.BEGINNING}
    pipe = pipeline(model, mb_args=(torch.zeros(2, 3),), split_spec=split)
    assert [(f.mode, f.stages) for f in detect(model=pipe)] == [("pipeline", 2)]
    with pytest.raises(
        TypeError, match=r"expected a module, .* but got list; pass one"
    ):
        detect(model=[stage, stage])


def test_ddp():
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    assert modes(model=model) == ["ddp"]
    assert modes(model=model.module) == []
    stage = PipelineStage(model, 0, 2, CPU)
    assert modes(model=stage) == ["pipeline", "ddp"]


def test_several_devices():
    with FakeTensorMode():  # tensors on devices that this machine need not have
        host, one, other = (
            nn.Parameter(torch.empty(3, device=device))
            for device in ("cpu", "cuda:0", "cuda:1")
        )
    (finding,) = detect([host, one, other])
    assert finding.mode == "several_devices"
    assert "cuda:0, cuda:1" in finding.found
    assert detect([host, one]) == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(stage, monkeypatch):
    deepspeed = pytest.importorskip("deepspeed")
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**variables, "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(3, 3)
    plain = torch.optim.SGD(model.parameters(), 0.1)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=plain,
        config={
            "train_batch_size": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    assert modes(optimizer=optimizer) == ["deepspeed"]
    (finding,) = detect(model=engine)
    assert f"ZeRO stage {stage}" in finding.found
    assert modes(model.parameters()) == (["deepspeed"] if stage == 3 else [])


@pytest.mark.parametrize("local_rank", ["", "1"])
def test_ranks_of_a_group_that_no_launcher_has_made(local_rank, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    known = int(local_rank) if local_rank else None
    expected = LaunchContext("torch.distributed", 0, 1, "n0", local_rank=known)
    assert launch._context_in_group("n0") == expected


def test_a_store_whose_port_another_program_has():
    context = LaunchContext("torchrun", 0, 2, "127.0.0.1")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(LaunchError, match=r"start all ranks, .*free MASTER_PORT"),
    ):
        launch._store_of(context, taken.getsockname()[1])


def test_a_model_that_a_trainer_leaves_unwrapped():
    assert register_adasum_hook(nn.Linear(3, 3)) is None
