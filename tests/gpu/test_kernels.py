"""The kernels and reductions of tests/native on a real device, ranks as threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from rooms import sources

from adasum_hvd.install import nccl
from adasum_hvd.install.sources import NATIVE

TESTS = Path(__file__).parents[1] / "native"

DEVICES = sorted(Path("/dev").glob("nvidia[0-9]*"))
needs_a_device = pytest.mark.skipif(not DEVICES, reason="needs a CUDA device")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# The others differ in what they compare, not in what the kernels do.
EVERY_KERNEL = (
    "agrees with the float64 tree",
    "groups and placements",
    "nothing waits for the device",
)


def nvcc() -> str:
    """Return the compiler's path, or skip."""
    try:
        return str(nccl.cuda_home() / "bin" / "nvcc")
    except nccl.Missing as error:
        pytest.skip(str(error))


def compile_program(directory: Path, architecture: str) -> Path:
    """Compile the test program with nvcc, without NCCL: ranks copy from each other."""
    compiler = nvcc()
    objects = []
    # A device walks its trees itself; what does that for hosts stays out.
    parts = sources(
        "reduce/tree.cc", "reduce/gram.cc", "reduce/layout.cc", "reduce/plan.cc"
    )
    parts |= sources("kernels", "cuda")
    for source, flags in {**parts, TESTS / "test_reduce.cc": ()}.items():
        target = directory / f"{source.stem}-{source.suffix[1:]}.o"
        host = ",".join(("-ffp-contract=off", "-Wno-psabi", *flags))
        command = [
            compiler,
            "-std=c++17",
            "-O2",
            "-fmad=false",
            f"-arch={architecture}",
        ]
        command += [
            f"-I{NATIVE}",
            f"-I{TESTS}",
            "-DADASUM_ON_DEVICE",
            "-Xcompiler",
            host,
        ]
        subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
        objects.append(str(target))
    program = directory / "test_device"
    subprocess.run(
        [compiler, f"-arch={architecture}", *objects, "-o", str(program), "-lpthread"],
        check=True,
    )
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return compile_program(tmp_path_factory.mktemp("device"), "native")


def test_nvcc_compiles_it_all(tmp_path):
    """Without a device, too: all that a machine with a toolkit can say."""
    if DEVICES:
        pytest.skip("the tests below do that here")
    assert compile_program(tmp_path, "sm_90").exists()


@needs_a_device
def test_reductions(program):
    listed = subprocess.run(
        [str(program), "--list"], capture_output=True, text=True, check=True
    )
    result = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") == len(listed.stdout.splitlines())
    assert "FAILED" not in result.stdout


@needs_a_device
@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer(program, tool):
    found = shutil.which("compute-sanitizer")
    if found is None:
        pytest.skip("compute-sanitizer is not installed")
    result = subprocess.run(
        [found, "--tool", tool, "--error-exitcode", "9", str(program), *EVERY_KERNEL],
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    assert result.stdout.count("ok ") == len(EVERY_KERNEL)
