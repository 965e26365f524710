"""The kernels and reductions of tests/native on a real device, ranks as threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from adasum_hvd.horovod.build import nccl
from adasum_hvd.horovod.build.sources import INCLUDES
from tests.native import rooms

TESTS = Path(__file__).parents[1] / "native"

DEVICES = sorted(Path("/dev").glob("nvidia[0-9]*"))
needs_a_device = pytest.mark.skipif(not DEVICES, reason="needs a CUDA device")
PROGRAMS = ("test_reduce", "test_trees", "test_device", "test_observation")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# The others differ in what they compare, not in what the kernels do.
EVERY_KERNEL = (
    "agrees with the float64 tree",
    "groups and placements",
    "nothing waits for the device",
    "plans fit what is reduced",
)


def nvcc() -> str:
    """Return the compiler's path, or skip."""
    try:
        return str(nccl.cuda_home() / "bin" / "nvcc")
    except nccl.Missing as error:
        pytest.skip(str(error))


def compile_programs(directory: Path, architecture: str) -> list[Path]:
    """Compile the test programs with nvcc, without NCCL: ranks copy from each other."""
    compiler = nvcc()
    command = [compiler, f"-arch={architecture}"]
    flags = ["-std=c++17", "-O2", "-fmad=false", "-DADASUM_ON_DEVICE"]
    flags += [*INCLUDES, f"-I{TESTS}"]

    def compile_one(source: Path, own: tuple[str, ...]) -> str:
        target = str(directory / f"{source.stem}-{source.suffix[1:]}.o")
        host = ",".join(("-ffp-contract=off", "-Wno-psabi", *own))
        line = [*command, *flags, "-Xcompiler", host, "-c", str(source), "-o", target]
        subprocess.run(line, check=True)
        return target

    parts = rooms.ARITHMETIC | rooms.KERNELS
    shared = [compile_one(source, own) for source, own in parts.items()]
    programs = []
    for name in PROGRAMS:
        program = directory / name
        own = compile_one(TESTS / f"{name}.cc", ())
        line = [*command, own, *shared, "-o", str(program), "-lpthread"]
        subprocess.run(line, check=True)
        programs.append(program)
    return programs


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
    return compile_programs(tmp_path_factory.mktemp("device"), "native")


def test_nvcc_compiles_it_all(tmp_path):
    """Without a device, too: all that a machine with a toolkit can say."""
    if DEVICES:
        pytest.skip("the tests below do that here")
    assert all(path.exists() for path in compile_programs(tmp_path, "sm_90"))


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
