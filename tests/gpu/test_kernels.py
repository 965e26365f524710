"""The kernels and reductions of tests/native on a real device, ranks as threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from adasum_hvd.horovod.build import nccl
from tests.gpu.programs import NAMES, compile_programs
from tests.gpu.steps import DEVICES, PROGRAMS

needs_a_device = pytest.mark.skipif(not DEVICES, reason="needs a CUDA device")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# The others differ in what they compare, not in what the kernels do.
EVERY_KERNEL = (
    "agrees with the float64 tree",
    "groups and placements",
    "nothing waits for the device",
    "plans fit what is reduced",
)


def run(commands: list[list[str]]) -> str:
    """Run commands, and return what they print."""
    printed = ""
    for command in commands:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=1800, check=False
        )
        printed += result.stdout
        assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    return printed


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> list[Path]:
    if PROGRAMS in os.environ:
        return [Path(os.environ[PROGRAMS], name) for name in NAMES]
    try:
        return compile_programs(tmp_path_factory.mktemp("device"), "native")
    except nccl.Missing as error:
        pytest.skip(str(error))


def test_nvcc_compiles_it_all(tmp_path):
    """Without a device, too: all that a machine with a toolkit can say."""
    if DEVICES:
        pytest.skip("the tests below do that here")
    try:
        programs = compile_programs(tmp_path, "sm_90")
    except nccl.Missing as error:
        pytest.skip(str(error))
    assert all(path.exists() for path in programs)


@needs_a_device
def test_reductions(programs):
    listed = run([[str(program), "--list"] for program in programs])
    printed = run([[str(program)] for program in programs])
    assert printed.count("ok ") == len(listed.splitlines())
    assert "FAILED" not in printed


@needs_a_device
@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer(programs, tool):
    found = shutil.which("compute-sanitizer")
    if found is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [found, "--tool", tool, "--error-exitcode", "9"]
    printed = run([[*command, str(program), *EVERY_KERNEL] for program in programs])
    assert printed.count("ok ") == len(EVERY_KERNEL)
