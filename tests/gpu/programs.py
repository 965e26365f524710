"""Compile with nvcc what runs on a device without torch: the native tests, the kernels' benchmark.

python -m tests.gpu.programs FOLDER [--architecture sm_90]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adasum_hvd.horovod.build import nccl
from adasum_hvd.horovod.build.sources import INCLUDES
from tests.gpu.steps import PROGRAMS
from tests.native import rooms

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests" / "native"
NAMES = ("test_reduce", "test_trees", "test_device", "test_observation")
AT_ONCE = 2  # compilers, each of which takes a GB


def compile_programs(directory: Path, architecture: str) -> list[Path]:
    """Compile the test programs, without NCCL: ranks copy from each other.

    Raises:
        nccl.Missing: there is no nvcc.
        subprocess.CalledProcessError: a source does not compile.
    """
    compiler = [str(nccl.cuda_home() / "bin" / "nvcc"), f"-arch={architecture}"]
    flags = ["-std=c++17", "-O2", "-fmad=false", "-DADASUM_ON_DEVICE"]
    flags += [*INCLUDES, f"-I{TESTS}"]

    def compile_one(source: Path, own: tuple[str, ...] = ()) -> str:
        target = str(directory / f"{source.stem}-{source.suffix[1:]}.o")
        host = ",".join(("-ffp-contract=off", "-Wno-psabi", *own))
        line = [*compiler, *flags, "-Xcompiler", host, "-c", str(source), "-o", target]
        subprocess.run(line, check=True)
        return target

    parts = rooms.ARITHMETIC | rooms.KERNELS
    with ThreadPoolExecutor(AT_ONCE) as pool:
        shared = list(pool.map(compile_one, parts, parts.values()))
        own = list(pool.map(compile_one, [TESTS / f"{name}.cc" for name in NAMES]))
    programs = [directory / name for name in NAMES]
    for program, compiled in zip(programs, own, strict=True):
        line = [*compiler, compiled, *shared, "-o", str(program), "-lpthread"]
        subprocess.run(line, check=True)
    return programs


def main() -> None:
    """Compile all of them into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--architecture", default="native")
    options = parser.parse_args()
    sys.path.append(str(REPOSITORY / "benchmarks"))
    from gpu import build_kernels

    folder = options.folder or Path(os.environ.pop(PROGRAMS))
    folder.mkdir(parents=True, exist_ok=True)
    compile_programs(folder, options.architecture)
    build_kernels(folder, options.architecture)
    for path in folder.glob("*.o"):
        path.unlink()


if __name__ == "__main__":
    main()
