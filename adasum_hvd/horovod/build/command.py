"""Build Horovod with the AdaSum op for this environment: docs/internals.md, Inside Horovod.

The cache directory keeps finished wheels, keyed by everything that decides their content. It also
keeps one build tree per environment, so that a change of one native file compiles only that file,
and a framework that is added only what binds the library to it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from adasum_hvd.horovod.build import environment, nccl, sources
from adasum_hvd.horovod.build.environment import BuildError, Environment, detect
from adasum_hvd.horovod.build.prerequisites import printed
from adasum_hvd.horovod.launch.supervisor import running

LOCAL_VERSION = "adasum"
_STEP = re.compile(r"\[\s*(\d+)(?:%|/(\d+))\]\s*(.*)")
_COMPILER_ERROR = re.compile(r"(\berror:|CMake Error|undefined reference|ninja: error)")

_CMAKE_WRAPPER = """#!/bin/sh
# HOROVOD_CMAKE: adds the injection to the configure call, skips a call without effect.
case "$1" in
  --version) exec {cmake} "$@" ;;
  --build) exec {cmake} --build . --parallel {jobs} ;;
esac
if [ -f build.ninja ] && [ "$(cat adasum_configured 2>/dev/null)" = "{key}" ]; then exit 0; fi
rm -f CMakeCache.txt adasum_configured
{cmake} "$@" -DCMAKE_PROJECT_horovod_INCLUDE={inject} {extra} || exit $?
echo "{key}" > adasum_configured
"""


def _build_variables(env: Environment, wrapper: Path) -> dict[str, str]:
    variables = dict(os.environ, PATH=environment.scripts_path(), PYTHONUNBUFFERED="1")
    variables |= env.settings
    if "HOROVOD_CUDA_HOME" in env.settings:
        variables |= nccl.build_variables(variables, wrapper.with_name("nccl"))
    variables["HOROVOD_CMAKE"] = str(wrapper)
    variables["HOROVOD_LOCAL_VERSION"] = LOCAL_VERSION
    variables.setdefault("CMAKE_GENERATOR", "Ninja")
    for name, knob in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        chosen = name in env.frameworks
        variables[f"HOROVOD_{'WITH' if chosen else 'WITHOUT'}_{knob}"] = "1"
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
    with (
        log.open("w") as sink,
        running(
            command, cwd=cwd, env=variables, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            progress.feed(line)
        process.wait()
    progress.close()
    if process.returncode:
        raise BuildError(f"Horovod did not build: {_first_error(log)}\nfull log: {log}")


def _first_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if _COMPILER_ERROR.search(line):
            return "\n".join(lines[number : number + 6])
    return "\n".join(lines[-6:])


def build(
    frameworks: list[str] | None = None,
    mpi: bool | None = None,
    gpu: str | None = None,
    force: bool = False,
    debug: bool = False,
) -> Path:
    """Return this environment's wheel (see :func:`detect`); build it if needed, or forced."""
    env = detect(frameworks, mpi, gpu, debug)
    wheels = sources.cache_dir() / "wheels" / env.key(sources.native_key())
    with sources.locked(_root(env)):
        cached = sorted(wheels.glob("horovod-*.whl"))
        if cached and not force:
            return cached[0]
        return _build_wheel(env, wheels)


def _root(env: Environment) -> Path:
    """Return this environment's build tree, for any frameworks: commands name their versions."""
    return sources.cache_dir() / "build" / replace(env, frameworks={}).key(sys.prefix)


def _build_wheel(env: Environment, wheels: Path) -> Path:
    root = _root(env)
    tree = sources.source_tree(root)
    sources.sync_native(root / "adasum_native")
    wrapper = root / "cmake"
    wrapper.write_text(
        _CMAKE_WRAPPER.format(
            cmake=shlex.quote(_cmake()),
            jobs=(os.cpu_count() or 1) + 1,
            inject=shlex.quote(str(root / "adasum_native" / "cmake" / "inject.cmake")),
            key=env.key(),
            extra=f"-DCMAKE_BUILD_RPATH='{nccl.RPATH}'" if env.nccl else "",
        )
    )
    wrapper.chmod(0o755)
    backends = {"gloo": True, "mpi": bool(env.mpi), "nccl": env.nccl}
    built = filter(backends.get, backends)
    parts = ", ".join([*env.frameworks, *built])
    print(
        f"building Horovod {sources.HOROVOD_VERSION} with AdaSum ({parts})", flush=True
    )
    # Not `pip wheel`: after a compiler error it deletes the build tree.
    command = [sys.executable, "setup.py", "bdist_wheel"]
    command += ["--dist-dir", str(root / "dist")]
    shutil.rmtree(root / "dist", ignore_errors=True)
    for library in tree.glob("build/lib*/horovod/*/*.so"):
        library.unlink()  # perhaps of a framework that is left out now
    started = time.monotonic()
    _run_logged(command, tree, _build_variables(env, wrapper), root / "build.log")
    (wheel,) = (root / "dist").glob("horovod-*.whl")
    wheels.mkdir(parents=True, exist_ok=True)
    target = wheels / wheel.name
    shutil.move(wheel, target)
    print(f"built in {time.monotonic() - started:.0f} s: {target}", flush=True)
    return target


def _cmake() -> str:
    cmake = shutil.which("cmake", path=environment.scripts_path())
    if cmake is None:
        raise BuildError(
            "expected cmake >=3.21,<4 on PATH, but got none; pip install 'cmake<4'"
        )
    match = re.search(r"(\d+)\.(\d+)", printed(cmake, "--version"))
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (3, 21) <= version < (4, 0):
        raise BuildError(
            f"expected cmake >=3.21,<4 (gloo's minimum version), but got {version[0]}.{version[1]} "
            f"at {cmake}; pip install 'cmake<4'"
        )
    return cmake


def install(wheel: Path) -> None:
    """Install `wheel` into this environment with pip; it replaces any other Horovod."""
    stamp = Path(sys.prefix) / "adasum_hvd_installed"
    expected = f"{wheel} {wheel.stat().st_mtime_ns}"
    ours = f"{sources.HOROVOD_VERSION}+{LOCAL_VERSION}"
    is_stamped = stamp.exists() and stamp.read_text() == expected
    if is_stamped and environment.version_of("horovod") == ours:
        return
    sources.run_pip(
        f"{wheel.name}: expected to be installed in {sys.prefix}",
        "fix that and run `adasum-hvd build` again",
        ["install", "--force-reinstall", "--no-deps", str(wheel)],
    )
    # This process may have loaded a framework or the former library already.
    check = [sys.executable, "-m", "adasum_hvd.horovod.preflight"]
    loaded = subprocess.run(check, capture_output=True, text=True, check=False)
    if loaded.returncode:
        raise BuildError(
            f"expected a Horovod that loads, but got: {loaded.stdout or loaded.stderr}; it "
            "stays installed; report this with the output of `adasum-hvd doctor`"
        )
    stamp.write_text(expected)
