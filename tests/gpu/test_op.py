"""CUDA tensors in real jobs of one or more ranks, which share devices where there are fewer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from launch import Configuration, case_names, launch

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("adasum_hvd.torch")

SHARING = 23200  # NCCL's version from which on several ranks may share a device
CASES = "cases_gpu_torch"
SLICED = (("ADASUM_HVD_REPLICATE_BYTES", "0"),)
SHARED = (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),)
TWO_HOSTS = {"hosts": "localhost:2,127.0.0.1:2"}
CONFIGURATIONS = [
    Configuration(CASES, "gloo", 1, SHARED),
    Configuration(CASES, "gloo", 2, SHARED),
    Configuration(CASES, "gloo", 3, SHARED + SLICED),
    Configuration(CASES, "gloo", 4, SHARED + SLICED),
    Configuration(CASES, "gloo", 4, SHARED + SLICED, **TWO_HOSTS),
    Configuration(CASES, "gloo", 3, SHARED + SLICED, "localhost:1,127.0.0.1:2"),
    Configuration(CASES, "mpi", 2, SHARED + SLICED),
]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not hvd.nccl_built(), reason="needs a Horovod built with NCCL"),
]
_outcomes: dict[Configuration, object] = {}


def outcome_of(configuration: Configuration):
    """Return the outcome of a configuration, which is launched once."""
    devices = torch.cuda.device_count()
    # On hosts that are one machine, ranks of the same place take the same device.
    most = 2 if configuration.hosts else configuration.ranks
    shares = configuration.ranks > devices or (configuration.hosts and most < 4)
    if shares and configuration.ranks > 1 and hvd.nccl_built() < SHARING:
        pytest.skip(
            f"{configuration.ranks} ranks on {devices} devices: required NCCL 2.32 or newer, "
            f"got {hvd.nccl_built()}"
        )
    if configuration.backend == "mpi" and not hvd.mpi_built():
        pytest.skip("needs a Horovod built with MPI")
    if configuration not in _outcomes:
        _outcomes[configuration] = launch(configuration)
    return _outcomes[configuration]


@pytest.mark.parametrize("name", case_names(CASES))
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_case(configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)
