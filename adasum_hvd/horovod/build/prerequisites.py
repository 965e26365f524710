"""Prerequisites of the set-up; standard library only.

`make setup` runs this file with the machine's own Python before `.venv` exists, and
`adasum_hvd.horovod.build.command` calls :func:`missing` before it starts a compiler.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

OLDEST, NEWEST = (3, 10), (3, 15)
NEWEST_OF_TENSORFLOW = (3, 13)
_PROBE = "#include <optional>\nint main() { return std::optional<int>(0).value(); }\n"


def printed(*words: str, check: bool = True) -> str:
    """Return a command's standard output; if it must succeed (`check`), raise if it fails."""
    return subprocess.run(words, capture_output=True, text=True, check=check).stdout


def compiler() -> str | None:
    """Return the C++ compiler in use: `$CXX`, else the first of c++, g++, clang++."""
    chosen = os.environ.get("CXX")
    if chosen:
        return shutil.which(chosen)
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _standard() -> int:
    """Return the C++ standard that the headers of the installed torch need."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return 17
    return 20 if (int(major), int(minor)) >= (2, 14) else 17


def _compiles(cxx: str, standard: int) -> bool:
    command = [cxx, f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"]
    probe = subprocess.run(
        command, input=_PROBE.encode(), capture_output=True, check=False
    )
    return probe.returncode == 0


def missing(*, need_venv: bool = False, need_tensorflow: bool = False) -> list[str]:
    """Return a sentence for each missing prerequisite, with the package to install."""
    found = sys.version_info[:2]
    newest = NEWEST_OF_TENSORFLOW if need_tensorflow else NEWEST
    problems = []
    if not OLDEST <= found <= newest:
        problems.append(
            f"Python: expected {OLDEST[0]}.{OLDEST[1]} to {newest[0]}.{newest[1]}"
            f"{' for TensorFlow' * need_tensorflow}, but got {found[0]}.{found[1]}; run "
            "`make PYTHON=python3.11 ...`, after `make clean` if .venv has another Python"
        )
    version = f"{found[0]}.{found[1]}"
    if need_venv and not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        problems.append(
            f"Python's venv module: install the package python{version}-venv"
        )
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        problems.append(
            f"Python.h: install the package python{version}-dev (python3-devel)"
        )
    cxx, standard = compiler(), _standard()
    if cxx is None:
        problems.append(f"a C++{standard} compiler: install the package g++ (gcc-c++)")
    elif not _compiles(cxx, standard):
        newer = {17: 9, 20: 10}[standard]
        problems.append(
            f"a C++{standard} compiler: {cxx} does not accept -std=c++{standard}; install g++ "
            f"{newer} or newer"
        )
    return problems


def main() -> int:
    """Print the missing prerequisites; return the exit status, 0 if there are none.

    An argument "tensorflow" asks for those of TensorFlow, too.
    """
    problems = missing(need_venv=True, need_tensorflow="tensorflow" in sys.argv)
    for problem in problems:
        print(f"missing: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
