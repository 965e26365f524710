"""Compiles the C++ parts of benchmarks, with the op's own sources, and runs them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from adasum_hvd.install import prerequisites
from adasum_hvd.install.sources import NATIVE

TESTS = Path(__file__).parents[1] / "tests/native"


def output_of(
    source: Path, parts: Sequence[str], calls: Sequence[Sequence[object]] = ((),)
) -> str:
    """Compile a program and return what it prints.

    Args:
        source: its own file.
        parts: files of `adasum_hvd/native` that belong to it, also as patterns.
        calls: of each run of the program, its arguments.
    """
    of_the_op = [str(path) for part in parts for path in sorted(NATIVE.glob(part))]
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-pthread"]
    flags += [f"-I{folder}" for folder in (NATIVE, TESTS)]
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/{source.stem}"
        command = [str(prerequisites.compiler()), *flags, str(source), *of_the_op]
        subprocess.run([*command, "-o", program], check=True)
        printed = [
            subprocess.run(
                [program, *map(str, arguments)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for arguments in calls
        ]
    return "".join(printed)
