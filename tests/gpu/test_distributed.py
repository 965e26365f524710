"""The engine on torch.distributed over NCCL; ranks share a device where there are fewer."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_op import DEVICES, SHARED, SHARING, job_of
from tests.parallel.harness.configurations import Configuration

CASES = [
    (configuration, case.name)
    for ranks in (1, 2, 3, 4)
    for configuration in [
        Configuration(("device.test_distributed",), "torchrun", ranks, SHARED)
    ]
    for case in configuration.cases
]
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device and a torch for it"
)


@pytest.mark.parametrize(("configuration", "name"), CASES, ids=str)
def test_case(configuration: Configuration, name: str) -> None:
    major, minor, *_ = torch.cuda.nccl.version()
    if configuration.ranks > DEVICES and major * 10000 + minor * 100 < SHARING:
        pytest.skip(
            f"{configuration.ranks} ranks share {DEVICES} devices: expected NCCL 2.32 or newer, "
            f"but got {major}.{minor}"
        )
    job_of(configuration).check(name)
