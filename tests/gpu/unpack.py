"""A kit's run.py: sets up an environment next to the machine's torch, and takes all steps.

    python3 kit/run.py [--minutes 9] [--output build/gpu]

The python3 that runs it must import torch. It is left as it is: packages and NCCL go to a virtual
environment in a temporary folder. No network is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

KIT = Path(__file__).resolve().parent
NCCL = "nvidia/nccl/lib/libnccl.so.2"  # in site-packages


def verify(manifest: dict) -> None:
    """Compare the kit's files with the manifest.

    Raises:
        SystemExit: a file is missing or has other content.
    """
    for name, expected in manifest["files"].items():
        path = KIT / name
        digest = (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "none"
        )
        if digest != expected["sha256"]:
            sys.exit(
                f"{name}: expected sha256 {expected['sha256']}, but got {digest}; "
                "copy the kit again"
            )


def extract(name: str, folder: Path) -> None:
    """Extract one of the kit's archives."""
    with tarfile.open(KIT / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def install(folder: Path, manifest: dict) -> str:
    """Create an environment that sees this Python's packages; install the kit's; return its Python.

    Raises:
        RuntimeError: this is not the Python for which the kit was built, or pip fails.
    """
    own = ".".join(map(str, sys.version_info[:2]))
    if own != (built := manifest["versions"]["python"]):
        raise RuntimeError(
            f"expected Python {built}, but got {own}; run the kit with it"
        )
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    extract("nccl", packages)
    # torch finds its own NCCL by its run path, unless a library of that name is there before it.
    lines = [f"import ctypes; ctypes.CDLL({str(packages / NCCL)!r})"]
    outer = [path for path in sys.path if path.endswith("-packages")]
    lines += [f"import site; site.addsitedir({path!r})" for path in outer]
    (packages / "kit.pth").write_text("\n".join(lines))
    python = str(folder / "bin" / "python")
    words = (
        "-m pip install --quiet --no-index --no-deps --no-compile --ignore-installed"
    )
    wheels = map(str, sorted(KIT.glob("wheels/*.whl")))
    shown = subprocess.run(
        [python, *words.split(), *wheels], capture_output=True, text=True, check=False
    )
    if shown.returncode:
        raise RuntimeError(
            f"expected pip to install the wheels, but got {shown.stderr}"
        )
    return python


def main() -> None:
    """Set up, and become the program that runs the steps."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9, help="set-up included")
    parser.add_argument("--output", type=Path, default=Path("build", "gpu"))
    options = parser.parse_args()
    manifest = json.loads((KIT / "manifest.json").read_text())
    verify(manifest)
    work = Path(tempfile.mkdtemp(prefix="adasum-kit-"))
    project, environment = work / "project", work / "environment"
    extract("project", project)
    extract("programs", work / "programs")
    (wheel,) = KIT.glob("wheels/adasum_hvd-*.whl")
    zipfile.ZipFile(wheel).extractall(project)  # there even if pip fails
    row = {"name": "set-up", "became": "ok", "why": ""}
    python, path = sys.executable, os.environ["PATH"]
    try:
        python = install(environment, manifest)
        path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    except (OSError, RuntimeError) as error:
        row |= {"became": "failed", "why": str(error)}
    seconds = time.monotonic() - started
    done = work / "set_up.json"
    row["seconds"] = round(seconds, 1)
    done.write_text(json.dumps({"row": row, "manifest": manifest}))
    words = ["--minutes", options.minutes - seconds / 60, "--output", options.output]
    words = [python, project / "tests" / "gpu" / "run.py", *words, "--set-up", done]
    own = {"PATH": path, "ADASUM_TEST_PROGRAMS": str(work / "programs")}
    os.execve(python, list(map(str, words)), os.environ | own)


if __name__ == "__main__":
    main()
