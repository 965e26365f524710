"""The op's arithmetic and shared memory in C++, ranks as threads, also under sanitizers."""

from __future__ import annotations

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adasum_hvd import prerequisites
from adasum_hvd.build import NATIVE

TESTS = Path(__file__).parents[1] / "native"
ARITHMETIC = (
    "tree.cc",
    "gram.cc",
    "kernels.cc",
    "layout.cc",
    "level.cc",
    "plan.cc",
    "reduce.cc",
    "workers.cc",
    "kernels_portable.cc",
)
SHARED_MEMORY = ("local_segment.cc", "local_bootstrap.cc", "transport_local.cc")
PROGRAMS = {"test_reduce": (ARITHMETIC, 21), "test_local": (SHARED_MEMORY, 10)}
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
CHOSEN = {("test_reduce", "tsan"): THREADED}
X86_FLAGS = {
    "kernels_avx2.cc": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512.cc": [
        "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx2", "-mfma", "-mf16c",
    ],
}  # fmt: skip
FORMS = {
    "plain": [],
    "asan-ubsan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-fsanitize=thread"],
}


def build(name: str, form: str, directory: Path) -> Path:
    """Compile a test program and what it tests with the flags of the injected CMake.

    Under sanitizers less optimized: that compiles in half the time and runs no slower.
    """
    cxx = prerequisites.compiler()
    common = [
        cxx,
        "-std=c++17",
        "-O1" if FORMS[form] else "-O2",
        "-g1",
        "-ffp-contract=off",
        "-Wno-psabi",
        "-pthread",
    ]
    common += [f"-I{NATIVE}", f"-I{TESTS}", *FORMS[form]]
    parts, _ = PROGRAMS[name]
    sources = {NATIVE / part: [] for part in parts} | {TESTS / f"{name}.cc": []}
    if parts is ARITHMETIC and platform.machine() == "x86_64":
        sources |= {NATIVE / part: flags for part, flags in X86_FLAGS.items()}

    def compile_one(item: tuple[Path, list[str]]) -> Path:
        source, flags = item
        target = directory / f"{source.stem}.o"
        subprocess.run(
            [*common, *flags, "-c", str(source), "-o", str(target)], check=True
        )
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources.items()))
    program = directory / name
    subprocess.run([*common, *map(str, objects), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, form: str, tmp_path: Path) -> None:
    program = build(name, form, tmp_path)
    chosen = CHOSEN.get((name, form), ())
    command = [str(program), *chosen]
    if (
        form == "tsan"
        and subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0
    ):
        # Older runtimes cannot map the address-space layouts of newer kernels.
        command = ["setarch", "-R", *command]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") == (len(chosen) or PROGRAMS[name][1])
    assert "FAILED" not in result.stdout
