"""The report of ptxas on the CUDA kernels, for every kind of device."""

from __future__ import annotations

import kernels
import pytest

from adasum_hvd.horovod.build import nccl


def test_kernels_spill_nothing_and_their_registers_are_listed() -> None:
    """`python docs/kernels.py` writes the list."""
    try:
        compiler = f"nvcc {nccl.nvcc_version(nccl.cuda_home())}"
    except nccl.Missing as error:
        pytest.skip(str(error))
    found = list(kernels.kernels())
    assert {kernel.name for kernel in found} >= {"GramKernel<8>", "SolveKernel"}
    assert [kernel for kernel in found if kernel.spilled] == []
    if not kernels.written().startswith(compiler):
        pytest.skip(f"the list is not of {compiler}")
    assert kernels.written() == kernels.table(found)
