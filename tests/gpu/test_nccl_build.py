"""`adasum-hvd build --gpu nccl` gave a Horovod that holds NCCL and finds pip's copy of it.

Needs no device; where there is one, a Horovod without NCCL is a failure and not a skip.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
from pathlib import Path

import pytest

from adasum_hvd.horovod.build import environment, nccl
from adasum_hvd.horovod.preflight import library_path

LIBRARIES = {name: library_path(name) for name in environment.installed_frameworks()}


def nccl_version_inside(framework: str) -> int:
    """Return NCCL's version code of Horovod's library for `framework`, 0 without NCCL."""
    importlib.import_module(framework)
    library = ctypes.CDLL(str(LIBRARIES[framework]), mode=ctypes.RTLD_GLOBAL)
    return library.horovod_nccl_built()


@pytest.fixture(params=[name for name, path in LIBRARIES.items() if path])
def framework(request) -> str:
    if not nccl_version_inside(request.param) and not Path("/dev/nvidiactl").exists():
        pytest.skip(
            f"Horovod for {request.param} is built without NCCL, no device here"
        )
    return request.param


def test_horovod_holds_nccl_of_pips_version(framework):
    header = (nccl.nccl_home() / "include" / "nccl.h").read_text()
    major, minor, patch = (
        int(re.search(rf"define NCCL_{part}\s+(\d+)", header)[1])
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    assert nccl_version_inside(framework) == major * 10000 + minor * 100 + patch


def test_library_finds_pips_nccl_without_help(framework):
    """By its own run path: no LD_LIBRARY_PATH, no framework that has loaded NCCL before."""
    shown = subprocess.run(
        ["ldd", str(LIBRARIES[framework])],
        env={}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.search(r"libnccl\.so\.2 => (\S+)", shown.stdout)
    assert found, shown.stdout
    expected = nccl.nccl_home() / "lib" / "libnccl.so.2"
    assert Path(found[1]).resolve() == expected.resolve()
