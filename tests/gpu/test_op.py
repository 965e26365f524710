"""CUDA tensors in real jobs of one or more ranks, which share devices where there are fewer."""

from __future__ import annotations

import ctypes
import functools
import importlib

import pytest

from adasum_hvd.horovod import binding
from adasum_hvd.horovod.build import environment
from adasum_hvd.horovod.preflight import library_path
from tests.gpu.steps import DEVICES
from tests.parallel.harness.configurations import (
    ASYNCHRONOUS,
    SLICED,
    TWO_STREAMS,
    Configuration,
)
from tests.parallel.harness.job import Job

SHARING = 23200  # NCCL's version from which on several ranks may share a device
FRAMEWORKS = ("torch", "tensorflow")
SHARED = (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),)
FORMS = [
    ("gloo", 1, SHARED, ""),
    ("gloo", 2, SHARED, ""),
    ("gloo", 3, SHARED + SLICED, ""),
    ("gloo", 4, SHARED + SLICED, ""),
    ("gloo", 4, SHARED + SLICED, "localhost:2,127.0.0.1:2"),
    ("gloo", 3, SHARED + SLICED, "localhost:1,127.0.0.1:2"),
    ("mpi", 2, SHARED + SLICED, ""),
    ("gloo", 1, ASYNCHRONOUS, ""),
    ("gloo", 2, SHARED + ASYNCHRONOUS, ""),
    ("gloo", 2, SHARED + SLICED + TWO_STREAMS, ""),
]
CASES = [
    (framework, configuration, case.name)
    for framework in FRAMEWORKS
    for form in FORMS
    for configuration in [Configuration((f"device.test_{framework}",), *form)]
    for case in configuration.cases
]
pytestmark = pytest.mark.skipif(not DEVICES, reason="needs a CUDA device")


@functools.cache
def library_of(framework: str) -> ctypes.CDLL:
    """Return Horovod's library, or skip where it does not reduce on devices."""
    path = (
        library_path(framework)
        if framework in environment.installed_frameworks()
        else None
    )
    if path is None:
        pytest.skip(f"needs a Horovod for {framework}")
    importlib.import_module(framework)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    if not binding.reduces_on_devices(library):
        pytest.skip("needs a Horovod built with NCCL")
    return library


@functools.cache
def job_of(configuration: Configuration) -> Job:
    """Return the job of a configuration, which is started once."""
    job = Job(configuration)
    job.wait()
    return job


@pytest.mark.parametrize(
    ("framework", "configuration", "name"),
    CASES,
    ids=lambda value: str(value),
)
def test_case(framework: str, configuration: Configuration, name: str) -> None:
    library = library_of(framework)
    # On hosts that are one machine, ranks of the same place take the same device.
    shared = configuration.hosts or configuration.ranks > DEVICES
    version = library.horovod_nccl_built()
    if configuration.ranks > 1 and shared and version < SHARING:
        pytest.skip(
            f"{configuration.ranks} ranks share {DEVICES} devices: required NCCL 2.32 or "
            f"newer, got {version}"
        )
    if configuration.backend == "mpi" and not library.horovod_mpi_built():
        pytest.skip("needs a Horovod built with MPI")
    job_of(configuration).check(name)
