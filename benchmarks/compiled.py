"""Compiles the C++ parts of benchmarks, with the op's own sources, and runs them."""

from __future__ import annotations

import fnmatch
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from adasum_hvd.horovod.build import prerequisites
from adasum_hvd.horovod.build.sources import INCLUDES, native_files

TESTS = Path(__file__).parents[1] / "tests/native"


def output_of(
    source: Path,
    parts: Sequence[str | Path],
    calls: Sequence[Sequence[object]] = ((),),
) -> str:
    """Compile a program and return what it prints.

    Args:
        source: its own file.
        parts: native files that belong to it, as patterns of names, or objects of them as paths.
        calls: of each run of the program, its arguments.
    """
    files = native_files()
    of_the_op = [str(part) for part in parts if isinstance(part, Path)]
    for pattern in (part for part in parts if isinstance(part, str)):
        of_the_op += [str(files[name]) for name in fnmatch.filter(files, pattern)]
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-pthread"]
    flags += [*INCLUDES, f"-I{TESTS}"]
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
