"""The op's arithmetic, shared memory and CUDA in C++, ranks as threads, also under sanitizers."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from adasum_hvd.install import nccl
from adasum_hvd.install.sources import NATIVE
from tests.native import compiling, rooms
from tests.native.rooms import SIMULATED, X86

TESTS = Path(__file__).parents[1] / "native"


@dataclass(frozen=True)
class Program:
    """A test program, for ranks on hosts or on simulated devices."""

    source: str
    on_device: bool = False

    def sources(self) -> dict[Path, tuple[str, ...]]:
        """Return what to compile, each file with flags of its own."""
        found = dict(rooms.ARITHMETIC)
        if self.on_device:
            found |= rooms.KERNELS | rooms.sources("transport/nccl.cc")
            found |= rooms.SIMULATED_DEVICE
        # A test that is on no list is a function that nothing uses.
        own = (*(_ON_DEVICE if self.on_device else ()), "-Werror=unused-function")
        return found | {TESTS / self.source: own}


_ON_DEVICE = ("-DADASUM_ON_DEVICE", "-DADASUM_SIMULATED", "-DADASUM_WITH_NCCL")
PROGRAMS = {
    path.stem: Program(path.name)
    for path in sorted(TESTS.glob("test_*.cc"))
    if path.stem != "test_device"
} | {
    # The same tests on devices, which here are simulated; tests/gpu has the real ones.
    "device_reduce": Program("test_reduce.cc", on_device=True),
    "device_trees": Program("test_trees.cc", on_device=True),
    "device_limits": Program("test_device.cc", on_device=True),
    "device_observation": Program("test_observation.cc", on_device=True),
}
THREADED_TREES = ("cancelling pairs", "levels walk the same tree")
CHOSEN = {
    # Where several threads share one reduction, and walk trees; the others would only show,
    # ten times slower than plain, that ranks share nothing.
    ("test_reduce", "tsan"): (
        "same bits in every form",
        "wide range in one float64 tensor",
        "changes of weights",
    ),
    ("test_trees", "tsan"): THREADED_TREES,
    ("test_trees", "asan-ubsan"): (*THREADED_TREES, "groups and placements"),
    ("test_parts", "tsan"): ("workers do every job once",),
    # Kernels could access memory out of bounds here.
    ("device_reduce", "asan-ubsan"): (
        "agrees with the float64 tree",
        "nothing waits for the device",
    ),
    ("device_trees", "asan-ubsan"): (
        "groups and placements",
        "cancelling pairs in levels",
    ),
    ("device_limits", "asan-ubsan"): (
        "memory goes in the order of its stream",
        "long tensors are folded in stretches",
    ),
}
# Of a process on several, every return of memory interrupts all others: a third of its time.
ON_ONE_PROCESSOR = ("test_reduce", "test_trees")
FORMS = {
    "plain": [],
    "asan-ubsan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-fsanitize=thread"],
}


def build(name: str, form: str) -> Path:
    """Return a program in a form, compiled with the injected CMake's flags.

    Under sanitizers less optimized: that compiles in half the time and runs no slower.
    Programs share what they have in common, and a second call compiles nothing.
    """
    flags = ["-std=c++17", "-g1", "-pthread", "-O1" if FORMS[form] else "-O2"]
    flags += ["-ffp-contract=off", "-Wno-psabi", "-Wno-unknown-pragmas", *FORMS[form]]
    flags += [f"-I{folder}" for folder in (NATIVE, TESTS, SIMULATED)]
    room = f"tests/{form}"
    compiled = compiling.objects(PROGRAMS[name].sources(), flags, room)
    return compiling.linked(compiled, flags, [], room, name)


CASES = [
    pytest.param(
        name,
        form,
        marks=pytest.mark.skipif(
            name.startswith("device") and not X86,
            reason="the simulated device is for x86-64",
        ),
    )
    for name in PROGRAMS
    for form in FORMS
    # A kernel's threads are fibers, which the thread sanitizer does not know; and what is
    # observed is no thread's business but one's.
    if form != "tsan" or not (name.startswith("device") or name == "test_observation")
]


def listed_by(command: list[str]) -> list[str]:
    """Return the names of a program's tests."""
    listed = subprocess.run(
        [*command, "--list"], capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_program(name: str, form: str) -> None:
    command = [str(build(name, form))]
    if (
        form == "tsan"
        and subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0
    ):
        # Older runtimes cannot map the address-space layouts of newer kernels.
        command = ["setarch", "-R", *command]
    chosen = CHOSEN.get((name, form)) or listed_by(command)
    # Devices exchange over NCCL, which here is simulated; under sanitizers by copies.
    over = {"ADASUM_TEST_TRANSPORT": "copy" if FORMS[form] else "nccl"}
    # glibc would return large blocks to the kernel, which clears them each time.
    over |= {
        "MALLOC_MMAP_THRESHOLD_": "1000000000",
        "MALLOC_TRIM_THRESHOLD_": "1000000000",
    }

    processors = itertools.cycle(sorted(os.sched_getaffinity(0)))

    def run(test: str) -> str:
        on = (
            ["taskset", "-c", str(next(processors))] if name in ON_ONE_PROCESSOR else []
        )
        result = subprocess.run(
            [*on, *command, test], capture_output=True, text=True, timeout=900, check=False,
            env=os.environ | over,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    with ThreadPoolExecutor(8) as pool:  # many of them mostly wait
        output = "".join(pool.map(run, chosen))
    assert "FAILED" not in output
    ran = re.findall(r"^ok (.*) \(", output, re.MULTILINE)
    skipped = dict(re.findall(r"^skipped (.*?): (.*)", output, re.MULTILINE))
    for test, why in skipped.items():
        warnings.warn(f"{test}: skipped: {why}", stacklevel=1)
    assert chosen and sorted([*ran, *skipped]) == sorted(chosen)


def nvcc() -> str:
    """Return the compiler's path, or skip."""
    try:
        return str(nccl.cuda_home() / "bin" / "nvcc")
    except nccl.Missing as error:
        pytest.skip(str(error))


def test_nvcc_compiles_the_device_code(tmp_path: Path) -> None:
    """The real compiler accepts the code that runs on the simulated CUDA; kernels in make soak."""
    benchmark = TESTS.parents[1] / "benchmarks" / "device_kernels.cc"
    for source in (*sorted((NATIVE / "cuda").glob("*.cc")), benchmark):
        command = [nvcc(), "-std=c++17", "-arch=sm_90", "-c", f"-I{NATIVE}"]
        target = str(tmp_path / f"{source.name}.o")
        subprocess.run(
            [*command, "-Werror", "all-warnings", str(source), "-o", target], check=True
        )


@pytest.mark.skipif(not X86, reason="instruction sets of x86-64")
def test_portable_kernels_are_for_every_processor() -> None:
    """Horovod's own flags ask for AVX, whose instructions begin with a "v"."""
    folder = Path(importlib.util.find_spec("horovod").origin).parent  # type: ignore[union-attr,arg-type]
    library = next(folder.glob("*/mpi_lib*.so"))
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        counts = {True: 0, False: 0}  # of instructions, by whether they need AVX
        portable = False
        for line in process.stdout:
            if line.endswith(">:\n"):
                portable = "::portable::" in line
            elif portable and (words := line.split("\t")[1:]):
                counts[words[0].startswith("v")] += 1
    assert counts[False] > 1000
    assert counts[True] == 0
