"""`adasum-hvd build --gpu nccl`: what it finds and what it says when something is not there."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch

from adasum_hvd import cli
from adasum_hvd.horovod.build import environment, nccl, sources

cpu_build_of_torch = pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch is a CUDA build here"
)


@pytest.fixture
def toolkit(tmp_path, monkeypatch) -> Path:
    """A CUDA toolkit whose nvcc can only tell its release, found through $CUDA_HOME."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
    )
    nvcc.chmod(0o755)
    for name in ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_GPU_OPERATIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return tmp_path / "cuda"


@pytest.fixture
def pip_nccl(tmp_path) -> Path:
    """The files of pip's NCCL, in their places."""
    home = tmp_path / "site" / "nvidia" / "nccl"
    (home / "include").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "include" / "nccl.h").write_text("#define NCCL_VERSION_CODE 22907\n")
    (home / "lib" / "libnccl.so.2").write_text("")
    return home


def test_no_toolkit_is_reported_with_the_remedy(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    command = ["build", "--frameworks", "torch", "--no-mpi", "--gpu", "nccl"]
    assert cli.main(command) == 1
    shown = capsys.readouterr().err
    assert re.search(rf"expected nvcc .* none in {tmp_path}; .* set CUDA_HOME", shown)


def test_toolkit_and_its_release(toolkit):
    assert nccl.cuda_home() == toolkit
    assert nccl.nvcc_version(toolkit) == "13.0"


def test_nvcc_may_be_a_script_that_calls_the_real_one(monkeypatch, tmp_path):
    real = tmp_path / "cuda-13.0" / "bin" / "nvcc"
    real.parent.mkdir(parents=True)
    real.write_text(f"#!/bin/sh\necho '#$ _HERE_={real.parent}' >&2\n")
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    for path in (real, script):
        path.chmod(0o755)
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{script.parent}:/bin:/usr/bin")
    assert nccl.cuda_home() == tmp_path / "cuda-13.0"


@cpu_build_of_torch
def test_a_cpu_build_needs_no_toolkit(toolkit, monkeypatch):
    monkeypatch.setenv("PATH", f"{toolkit}/bin:{os.environ['PATH']}")
    assert not nccl.torch_has_cuda()
    assert "HOROVOD_CUDA_HOME" not in environment.detect(["torch"], mpi=False).settings


@cpu_build_of_torch
def test_a_cpu_build_of_torch_is_refused(toolkit, pip_nccl, monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(pip_nccl))
    command = ["build", "--frameworks", "torch", "--no-mpi", "--gpu", "nccl"]
    assert cli.main(command) == 1
    assert (
        "expected torch built with CUDA, but got a CPU build" in capsys.readouterr().err
    )


def test_missing_nccl_names_the_package(toolkit):
    for package in nccl._PACKAGES:
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        pytest.skip(f"{package} is installed here")
    with pytest.raises(nccl.Missing, match="pip install nvidia-nccl-cu13"):
        nccl.nccl_home()


def test_another_major_release_of_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(nccl, "_ASK_TORCH", "print('12.6'); print('sm_80')")
    with pytest.raises(nccl.Missing, match=r"CUDA 12.*got 13\.0.*CUDA 12\.6 toolkit"):
        nccl.torch_devices("13.0")


def test_devices_are_those_of_torch(monkeypatch):
    flags = "sm_90 sm_90a sm_100 sm_80 sm_120 compute_120"
    monkeypatch.setattr(nccl, "_ASK_TORCH", f"print('13.0'); print('{flags}')")
    assert nccl.torch_devices("13.2") == "80,90,100,120"


def test_settings_and_key(toolkit, pip_nccl, monkeypatch):
    plain = environment.detect(["torch"], mpi=False)
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(pip_nccl))
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "90")
    env = environment.detect(["torch"], mpi=False, gpu="nccl")
    assert env.nccl
    assert not plain.nccl
    assert env.key() != plain.key()
    assert env.settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert env.settings["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"
    assert env.compiler.endswith("nvcc 13.0, NCCL 22907")
    header = pip_nccl / "include" / "nccl.h"
    header.write_text(header.read_text().replace("22907", "23203"))
    assert env.key() != environment.detect(["torch"], mpi=False, gpu="nccl").key()


def test_build_variables_lead_the_linker_to_pips_nccl(toolkit, pip_nccl, tmp_path):
    chosen = {
        "HOROVOD_CUDA_HOME": str(toolkit),
        "HOROVOD_NCCL_HOME": str(pip_nccl),
        "PATH": "/bin",
    }
    for _ in range(2):  # a second build finds the links of the first
        found = nccl.build_variables(chosen, tmp_path / "links")
    assert found["PATH"] == f"{toolkit}/bin:/bin"
    home = Path(found["HOROVOD_NCCL_HOME"])
    assert (home / "lib" / "libnccl.so").resolve() == pip_nccl / "lib" / "libnccl.so.2"
    assert (home / "include" / "nccl.h").exists()
    (pip_nccl / "lib" / "libnccl.so").write_text("")
    found = nccl.build_variables(chosen, tmp_path / "links")
    assert found["HOROVOD_NCCL_HOME"] == str(pip_nccl)


def test_horovod_reads_these_variables():
    """The names are Horovod's own: each stands in the CMake files of its source."""
    trees = sorted(
        sources.cache_dir().glob(f"build/*/horovod-{sources.HOROVOD_VERSION}")
    )
    if not trees:
        pytest.skip("Horovod's source is not unpacked here")
    files = [*trees[0].rglob("CMakeLists.txt"), *(trees[0] / "cmake").rglob("*.*")]
    text = "".join(path.read_text(errors="replace") for path in files)
    for name in (
        "HOROVOD_GPU_OPERATIONS",
        "HOROVOD_NCCL_LINK",
        "HOROVOD_NCCL_HOME",
        "HOROVOD_CUDA_HOME",
        "HOROVOD_BUILD_CUDA_CC_LIST",
    ):
        assert re.search(rf"\b{name}\b", text), name
