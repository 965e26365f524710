"""The op's arithmetic in C++, ranks as threads: as it is built, and under sanitizers."""

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
CORE = (
    "tree.cc",
    "gram.cc",
    "kernels.cc",
    "layout.cc",
    "reduce.cc",
    "kernels_portable.cc",
)
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


def build(form: str, directory: Path) -> Path:
    """Compile the arithmetic and its tests with the flags of the injected CMake."""
    cxx = prerequisites.compiler()
    common = [
        cxx,
        "-std=c++17",
        "-O2",
        "-g",
        "-ffp-contract=off",
        "-Wno-psabi",
        "-pthread",
    ]
    common += [f"-I{NATIVE}", f"-I{TESTS}", *FORMS[form]]
    sources = {NATIVE / name: [] for name in CORE} | {TESTS / "test_reduce.cc": []}
    if platform.machine() == "x86_64":
        sources |= {NATIVE / name: flags for name, flags in X86_FLAGS.items()}

    def compile_one(item: tuple[Path, list[str]]) -> Path:
        source, flags = item
        target = directory / f"{source.stem}.o"
        subprocess.run(
            [*common, *flags, "-c", str(source), "-o", str(target)], check=True
        )
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources.items()))
    program = directory / "test_reduce"
    subprocess.run([*common, *map(str, objects), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("form", FORMS)
def test_arithmetic(form: str, tmp_path: Path) -> None:
    program = build(form, tmp_path)
    command = [str(program)]
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
    assert result.stdout.count("ok ") >= 14
    assert "FAILED" not in result.stdout
