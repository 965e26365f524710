"""The engine on torch.distributed over NCCL; ranks share a device where there are fewer."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.gpu.steps import DEVICES
from tests.gpu.test_op import SHARED, SHARING, job_of
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


def loaded_nccl() -> int:
    """Return the version of the library that torch uses; torch reports the one it was built with.

    23200 is 2.32.0.
    """
    version = ctypes.c_int()
    assert ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)) == 0
    return version.value


@pytest.mark.parametrize(("configuration", "name"), CASES, ids=str)
def test_case(configuration: Configuration, name: str) -> None:
    if configuration.ranks > DEVICES and (version := loaded_nccl()) < SHARING:
        pytest.skip(
            f"{configuration.ranks} ranks share {DEVICES} devices: expected NCCL 2.32 or newer, "
            f"but got {version}"
        )
    job_of(configuration).check(name)
