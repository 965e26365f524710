"""Properties of this machine that decide whether jobs start and how fast they run."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adasum_hvd import __version__, core
from adasum_hvd.horovod.build import environment, nccl, prerequisites
from adasum_hvd.horovod.build.findings import DoctorFinding, State

ROOT = Path("/")
_SSH_SECONDS = 8


def findings(hosts: Sequence[str] = (), root: Path = ROOT) -> Iterator[DoctorFinding]:
    """Yield the properties and their meaning for a job, in which `hosts` must respond over ssh."""
    yield from _launchers()
    yield from _processors(root)
    yield from _autogroup(root)
    yield from _cuda()
    with ThreadPoolExecutor(len(hosts) or 1) as pool:
        yield from pool.map(over_ssh, hosts)


def description() -> str:
    """Return the processor's name and how many of them this process may use."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    name = model[1] if model else platform.processor()
    return f"{len(os.sched_getaffinity(0))} processors of {name or platform.machine()}"


def _launchers() -> Iterator[DoctorFinding]:
    for name, package in (("horovodrun", "Horovod"), ("mpirun", "MPI")):
        if found := shutil.which(name):
            fix = _flags_of_horovodrun() if name == "horovodrun" else ""
            yield DoctorFinding(name, found, fix=fix)
        elif installed := shutil.which(name, path=environment.scripts_path()):
            fix = f"activate the environment: its {name} is {installed}"
            yield DoctorFinding(name, "not on PATH", fix=fix)
        else:
            yield DoctorFinding(name, f"none ({package} brings it)")


def _flags_of_horovodrun() -> str:
    """Return advice if horovodrun's flags do not fit the mpirun that it finds."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return ""
    shown = prerequisites.printed(mpirun, "--version", check=False)
    version = re.search(r"\(Open MPI\) (\d+)", shown)
    if version is None or int(version[1]) < 5:
        return ""
    return (
        f"start it with --gloo: otherwise it passes flags of Open MPI 4 to {mpirun}, which is "
        f"Open MPI {version[1]}"
    )


def _processors(root: Path) -> Iterator[DoctorFinding]:
    mine, granted = len(os.sched_getaffinity(0)), core.quota(root)
    found, fix = f"{mine} of {os.cpu_count()}", ""
    if granted < mine:
        found += f", of which a control group grants {granted:g}"
        fix = f"start at most {max(1, int(granted))} ranks here, or raise the quota"
    yield DoctorFinding("processors", found, fix=fix)


def _autogroup(root: Path) -> Iterator[DoctorFinding]:
    switch = root / "proc/sys/kernel/sched_autogroup_enabled"
    if switch.exists() and switch.read_text().strip() == "1":
        found = "on: ranks that share processors wait for each other's slices"
        fix = (
            f"with more than {len(os.sched_getaffinity(0))} ranks here start them by mpirun or "
            "`adasum-hvd exec --nprocs N`, or write 0 to /proc/sys/kernel/sched_autogroup_enabled"
        )
        yield DoctorFinding("autogroup scheduling", found, State.FINE, fix)


def devices() -> list[str]:
    """Return the names of this machine's CUDA devices."""
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def _cuda() -> Iterator[DoctorFinding]:
    if present := devices():
        yield DoctorFinding("CUDA devices", ", ".join(present))
    compiler = shutil.which("nvcc")
    built = environment.version_of("torch") or ""
    major = re.search(r"\+cu(\d+)\d$", built)
    if compiler and major:
        nvcc_release = nccl.nvcc_version(Path(compiler).resolve().parents[1])
        same = nvcc_release.split(".")[0] == major[1]
        fix = "" if same else f"set CUDA_HOME to a CUDA {major[1]} toolkit to build"
        found = f"torch {built}, nvcc {nvcc_release}"
        yield DoctorFinding("CUDA releases", found, State.FINE, fix)


def over_ssh(host: str) -> DoctorFinding:
    """Return whether a host has this version of the package, by ssh as horovodrun uses it."""
    words = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_SECONDS // 2}"]
    words += [host, sys.executable, "-m", "adasum_hvd", "--version"]
    subject, fix = f"ssh {host}", f"make `ssh {host} true` work without a password"
    try:
        shown = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_SSH_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        fix = "install openssh-client"
        return DoctorFinding(subject, "no ssh here", State.BROKEN, fix)
    except subprocess.TimeoutExpired:
        late = f"no response in {_SSH_SECONDS} s"
        return DoctorFinding(subject, late, State.BROKEN, fix)
    lines = (shown.stdout or shown.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit status {shown.returncode}"
    if shown.returncode == 255:  # ssh's own
        return DoctorFinding(subject, last, State.BROKEN, fix)
    if last != f"adasum-hvd {__version__}":
        fix = f"install this version there, as {sys.executable}"
        return DoctorFinding(subject, last, State.MISSING, fix)
    return DoctorFinding(subject, last)
