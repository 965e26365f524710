"""Requirements of a build with CUDA: nvcc, NCCL and torch's list of devices.

NCCL is the package that pip installed with torch or TensorFlow, so that a process loads one copy
of it. All variables are Horovod's own; values that the user has set take precedence.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from adasum_hvd.horovod.build.prerequisites import printed

_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
# From site-packages/horovod/<framework>, where the built libraries are installed.
RPATH = "$ORIGIN/../../nvidia/nccl/lib"
_ASK_TORCH = (
    "import torch; print(torch.version.cuda or ''); "
    "print(torch._C._cuda_getArchFlags() if torch.version.cuda else '')"
)


class Missing(RuntimeError):
    """A requirement of a build with NCCL is missing."""


def cuda_home() -> Path:
    """Return the CUDA toolkit's folder: a variable's, else nvcc's on PATH, else /usr/local/cuda."""
    chosen = os.environ.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc")
    if chosen:
        home = Path(chosen)
    elif found:
        home = _folder_of(found)
    else:
        home = Path("/usr/local/cuda")
    if not Path(home, "bin", "nvcc").exists():
        raise Missing(
            f"expected nvcc of the CUDA toolkit, but got none in {home}; install the toolkit "
            "or set CUDA_HOME"
        )
    return home


def _folder_of(nvcc: str) -> Path:
    """Return the toolkit's folder; nvcc on PATH may be a script that calls the real one."""
    shown = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    match = re.search(r"_HERE_=(.+)", shown.stderr + shown.stdout)
    return Path(match[1].strip() if match else Path(nvcc).resolve().parent).parent


def torch_has_cuda() -> bool:
    """Return whether the installed torch is a CUDA build, from its metadata alone."""
    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return False
    needs = any(n.startswith(("nvidia-", "cuda-")) for n in torch.requires or [])
    return needs or "+cu" in torch.version


def nccl_home() -> Path:
    """Return the folder of pip's NCCL, with `include/nccl.h` and `lib/libnccl.so.2`."""
    for package in _PACKAGES:
        try:
            distribution = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        home = Path(str(distribution.locate_file("nvidia/nccl")))
        if Path(home, "include", "nccl.h").exists():
            return home
    raise Missing(
        f"expected NCCL's header and library, but got none in {sys.prefix}; "
        f"pip install {_PACKAGES[0]} (or set HOROVOD_NCCL_HOME)"
    )


def nvcc_version(home: Path) -> str:
    """Return the release of the nvcc in `home`, such as "13.0"."""
    shown = printed(str(home / "bin" / "nvcc"), "--version")
    match = re.search(r"release (\d+\.\d+)", shown)
    return match[1] if match else "unknown"


def torch_devices(nvcc: str) -> str:
    """Return the installed torch's compute capabilities, if this release of nvcc fits: "75,80"."""
    shown = printed(sys.executable, "-c", _ASK_TORCH)
    cuda, flags = (shown.splitlines() + ["", ""])[:2]
    if not cuda:
        raise Missing(
            "expected torch built with CUDA, but got a CPU build; install torch from an index "
            "with CUDA wheels, or leave out --gpu"
        )
    if cuda.split(".")[0] != nvcc.split(".")[0]:
        raise Missing(
            f"expected nvcc of CUDA {cuda.split('.')[0]}, with which torch is built, but got "
            f"{nvcc}; set CUDA_HOME to a CUDA {cuda} toolkit"
        )
    devices = {int(number) for number in re.findall(r"sm_(\d+)\b", flags)}
    if not devices:
        raise Missing(
            f"expected torch's list of devices, but got {flags!r}; set HOROVOD_BUILD_CUDA_CC_LIST"
        )
    return ",".join(map(str, sorted(devices)))


def toolkit_settings(
    frameworks: Mapping[str, str], chosen: Mapping[str, str]
) -> dict[str, str]:
    """Return Horovod's variables for a build with the CUDA toolkit; the user's own stay.

    A Horovod for a CUDA build of torch needs the toolkit even without NCCL: it then waits for the
    device and copies CUDA tensors through the host.
    """
    home = cuda_home()
    found = {"HOROVOD_CUDA_HOME": str(home)}
    if "torch" in frameworks and "HOROVOD_BUILD_CUDA_CC_LIST" not in chosen:
        found["HOROVOD_BUILD_CUDA_CC_LIST"] = torch_devices(nvcc_version(home))
    return {**found, **chosen}


def settings(
    frameworks: Mapping[str, str], chosen: Mapping[str, str]
) -> dict[str, str]:
    """Return Horovod's variables for a build with NCCL, as above."""
    found = {"HOROVOD_NCCL_LINK": "SHARED", **toolkit_settings(frameworks, chosen)}
    if not {"HOROVOD_NCCL_HOME", "HOROVOD_NCCL_LIB"} & chosen.keys():
        found["HOROVOD_NCCL_HOME"] = str(nccl_home())
    return {**found, "HOROVOD_GPU_OPERATIONS": "NCCL"}


def versions(chosen: Mapping[str, str]) -> str:
    """Return the versions of nvcc and NCCL that the variables in `chosen` name."""
    nvcc = nvcc_version(Path(chosen["HOROVOD_CUDA_HOME"]))
    if chosen.get("HOROVOD_GPU_OPERATIONS") != "NCCL":
        return f"nvcc {nvcc}"
    header = Path(chosen.get("HOROVOD_NCCL_HOME", ""), "include", "nccl.h")
    text = header.read_text(errors="replace") if header.exists() else ""
    code = re.search(r"NCCL_VERSION_CODE\s+(\d+)", text)
    return f"nvcc {nvcc}, NCCL {code[1] if code else 'of the system'}"


def build_variables(chosen: Mapping[str, str], target: Path) -> dict[str, str]:
    """Return further variables, for the tools that Horovod's build calls."""
    home = chosen["HOROVOD_CUDA_HOME"]
    found = {
        "CUDA_HOME": home,  # torch's CMake and Horovod's nvcc flags read these
        "PATH": os.pathsep.join([str(Path(home, "bin")), chosen["PATH"]]),
    }
    if given := chosen.get("HOROVOD_NCCL_HOME"):
        found["HOROVOD_NCCL_HOME"] = str(_linkable(Path(given), target))
    return found


def _linkable(home: Path, target: Path) -> Path:
    """Return a folder that CMake can link against, for the NCCL in `home`.

    pip's package has `libnccl.so.2` but no `libnccl.so`, which linkers look for: `target` then gets
    links to the package's files. Any other `home` is returned unchanged.
    """
    library = home / "lib" / "libnccl.so.2"
    if not library.exists() or library.with_suffix("").exists():
        return home
    shutil.rmtree(target, ignore_errors=True)
    (target / "lib").mkdir(parents=True)
    (target / "lib" / "libnccl.so").symlink_to(library)
    (target / "include").symlink_to(home / "include")
    return target
