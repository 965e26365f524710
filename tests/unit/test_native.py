"""The op's arithmetic, shared memory and CUDA in C++, ranks as threads, also under sanitizers."""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from rooms import X86, sources

from adasum_hvd.install import nccl, prerequisites
from adasum_hvd.install.sources import NATIVE

TESTS = Path(__file__).parents[1] / "native"

SIMULATED = TESTS / "simulated_cuda"
ARITHMETIC = ("reduce", "kernels", "op/settings.cc")
DEVICE = ("cuda", "transport/nccl.cc")


@dataclass(frozen=True)
class Program:
    """A test program: its own source, and what it tests."""

    source: str
    parts: tuple[str, ...]
    flags: tuple[str, ...] = ()

    def sources(self) -> dict[Path, tuple[str, ...]]:
        """Return what to compile, each file with flags of its own."""
        found = sources(*self.parts)
        if DEVICE[0] in self.parts:
            found[SIMULATED / "simulated_cuda.cc"] = ()
        # A test that is on no list is a function that nothing uses.
        own = (*self.flags, "-Werror=unused-function")
        return found | {TESTS / self.source: own}


PROGRAMS = {
    "test_reduce": Program("test_reduce.cc", ARITHMETIC),
    "test_local": Program("test_local.cc", ("transport/local",)),
    # The same tests on devices, which here are simulated; tests/gpu has the real ones.
    "test_device": Program(
        "test_reduce.cc",
        ARITHMETIC + DEVICE,
        ("-DADASUM_ON_DEVICE", "-DADASUM_SIMULATED", "-DADASUM_WITH_NCCL"),
    ),
}
# The tests in which several threads share one reduction, explicit walks too; the others would
# only show, ten times slower than plain, that ranks share nothing.
THREADED = (
    "same bits in every form",
    "wide range in one float64 tensor",
    "cancelling pairs",
    "groups and placements",
    "levels walk the same tree",
    "changes of weights",
    "workers do every job once",
)
# Where kernels could read or write what is not theirs.
EVERY_KERNEL = (
    "agrees with the float64 tree",
    "groups and placements",
    "cancelling pairs in levels",
    "nothing waits for the device",
)
CHOSEN = {
    ("test_reduce", "tsan"): THREADED,
    ("test_device", "asan-ubsan"): EVERY_KERNEL,
}
FORMS = {
    "plain": [],
    "asan-ubsan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-fsanitize=thread"],
}


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Callable[[str, str], Path]:
    """Return a function that compiles a program in a form, with the injected CMake's flags.

    Under sanitizers less optimized: that compiles in half the time and runs no slower.
    Programs share what they have in common.
    """
    root = tmp_path_factory.mktemp("native")
    objects: dict[tuple[str, ...], Path] = {}

    def compile_and_link(name: str, form: str) -> Path:
        common = [str(prerequisites.compiler()), "-std=c++17", "-g1", "-pthread"]
        common += ["-O1" if FORMS[form] else "-O2", "-ffp-contract=off", "-Wno-psabi"]
        common += [
            "-Wno-unknown-pragmas",
            f"-I{NATIVE}",
            f"-I{TESTS}",
            f"-I{SIMULATED}",
        ]
        common += FORMS[form]

        def compile_one(item: tuple[Path, tuple[str, ...]]) -> Path:
            source, flags = item
            key = (str(source), form, *flags)
            if key not in objects:
                target = root / f"{len(objects)}-{source.stem}-{form}{''.join(flags)}.o"
                objects[key] = target
                command = [*common, *flags, "-x", "c++", "-c", str(source)]
                subprocess.run([*command, "-o", str(target)], check=True)
            return objects[key]

        sources = PROGRAMS[name].sources()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(compile_one, sources.items()))
        program = root / f"{name}-{form}"
        subprocess.run([*common, *map(str, compiled), "-o", str(program)], check=True)
        return program

    return compile_and_link


CASES = [
    pytest.param(
        name,
        form,
        marks=pytest.mark.skipif(
            name == "test_device" and not X86,
            reason="the simulated device is for x86-64",
        ),
    )
    for name in PROGRAMS
    for form in FORMS
    # A kernel's threads are fibers, which the thread sanitizer does not know.
    if (name, form) != ("test_device", "tsan")
]


def listed_by(command: list[str]) -> list[str]:
    """Return the names of a program's tests."""
    listed = subprocess.run(
        [*command, "--list"], capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_program(name: str, form: str, build) -> None:
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
    result = subprocess.run(
        [*command, *chosen], capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | over,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILED" not in result.stdout
    ran = re.findall(r"^ok (.*) \(", result.stdout, re.MULTILINE)
    skipped = dict(re.findall(r"^skipped (.*?): (.*)", result.stdout, re.MULTILINE))
    for test, why in skipped.items():
        warnings.warn(f"{test}: skipped: {why}", stacklevel=1)
    assert chosen and sorted([*ran, *skipped]) == sorted(chosen)


def test_nvcc_compiles_what_is_for_devices(tmp_path: Path) -> None:
    """What the simulated CUDA takes, the real compiler takes, too."""
    try:
        compiler = nccl.cuda_home() / "bin" / "nvcc"
    except nccl.Missing as error:
        pytest.skip(str(error))
    for source in sources(DEVICE[0]):
        command = [str(compiler), "-std=c++17", "-fmad=false", "-arch=sm_90", "-c"]
        command += [f"-I{NATIVE}", "-Werror", "all-warnings", str(source)]
        target = str(tmp_path / f"{source.name}.o")
        subprocess.run([*command, "-o", target], check=True)
