"""How Horovod's wheel is keyed, cached and built; the errors are those of real tools."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

from adasum_hvd import cli
from adasum_hvd.horovod.build import command as build
from adasum_hvd.horovod.build import environment, prerequisites, sources

REPOSITORY = Path(__file__).parents[2]


def test_nothing_is_missing_here():
    assert prerequisites.missing(need_venv=True) == []


def test_pythons_that_no_horovod_was_built_for_are_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    assert prerequisites.missing() == []
    (problem,) = prerequisites.missing(need_tensorflow=True)
    assert problem.startswith(
        "Python: expected 3.10 to 3.13 for TensorFlow, but got 3.15;"
    )
    monkeypatch.setattr(sys, "argv", ["prerequisites.py", "tensorflow"])
    assert prerequisites.main() == 1 and "for TensorFlow" in capsys.readouterr().err
    monkeypatch.setattr(sys, "version_info", (3, 16, 0))
    (problem,) = prerequisites.missing()
    assert problem.startswith("Python: expected 3.10 to 3.15, but got 3.16; run `make")


def test_a_compiler_without_cxx17_is_named(monkeypatch, tmp_path):
    old = tmp_path / "old-g++"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    (problem,) = prerequisites.missing()
    assert re.search(r"old-g\+\+ does not accept -std=c\+\+17; install g\+\+", problem)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    (problem,) = prerequisites.missing()
    assert "install the package g++" in problem


def test_a_compiler_without_cxx20_is_named_if_torch_needs_it(monkeypatch, tmp_path):
    cxx = prerequisites.compiler()
    old = tmp_path / "g++-9"
    old.write_text(f'#!/bin/sh\ncase "$*" in *c++20*) exit 1;; esac\nexec {cxx} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    for version, expected in (("2.13.0+cpu", 0), ("2.14.1", 1), ("2.15.0", 1)):
        dist = tmp_path / version / "torch-1.dist-info"
        dist.mkdir(parents=True)
        (dist / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        with monkeypatch.context() as context:
            context.syspath_prepend(str(dist.parent))
            problems = prerequisites.missing()
        assert len(problems) == expected
        if problems:
            assert "does not accept -std=c++20; install g++ 10 or newer" in problems[0]


def test_key_follows_everything_that_decides_the_wheel(monkeypatch):
    here = environment.detect(["torch"], mpi=False)
    assert here.key() == environment.detect(["torch"], mpi=False).key()
    assert here.key() != environment.detect(["tensorflow"], mpi=False).key()
    assert here.key() != environment.detect(["torch"], mpi=True).key()
    debug = environment.detect(["torch"], mpi=False, debug=True)
    assert here.key() != debug.key()
    assert debug.settings["CXXFLAGS"].endswith("-g")
    monkeypatch.setenv("HOROVOD_DEBUG", "1")
    assert here.key() != environment.detect(["torch"], mpi=False).key()


def test_a_framework_is_added_in_the_tree_of_the_others():
    both = environment.detect(mpi=False)
    for name in both.frameworks:
        assert build._root(environment.detect([name], mpi=False)) == build._root(both)
    with_mpi, debug = environment.detect(mpi=True), environment.detect(debug=True)
    assert len({build._root(one) for one in (both, with_mpi, debug)}) == 3


def test_native_key_follows_the_sources(monkeypatch, tmp_path):
    before = sources.native_key()
    monkeypatch.setattr(sources, "NATIVE", tmp_path)  # the core stays
    (tmp_path / "a.cc").write_text("int a;")
    first = sources.native_key()
    (tmp_path / "a.cc").write_text("int b;")
    assert len({before, first, sources.native_key()}) == 3


def test_sync_touches_only_what_changed(monkeypatch, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "cmake").mkdir(parents=True)
    monkeypatch.setattr(sources, "NATIVE", source)
    for name in ("a.cc", "b.h", "cmake/c.cmake"):
        (source / name).write_text(name)
    sources.sync_native(target)
    os.utime(target / "a.cc", (1, 1))
    (source / "b.h").write_text("new")
    (source / "cmake/c.cmake").unlink()
    sources.sync_native(target)
    assert (target / "a.cc").stat().st_mtime == 1
    assert (target / "b.h").read_text() == "new"
    assert not (target / "cmake/c.cmake").exists()


def test_first_compiler_error_is_found(tmp_path):
    broken = tmp_path / "broken.cc"
    broken.write_text("int f() { return undeclared_name; }\n")
    compiled = subprocess.run(
        [prerequisites.compiler(), "-c", str(broken)],
        capture_output=True,
        text=True,
        check=False,
    )
    log = tmp_path / "log"
    log.write_text(
        "[1/9] fine\nwarning: nothing\n" + compiled.stderr + "ninja: stopped\n"
    )
    assert "undeclared_name" in build._first_error(log)
    assert not build._first_error(log).startswith("[1/9]")


def test_a_failing_build_names_the_error_and_the_log(tmp_path):
    script = "print('[1/2] Building CXX object x.cc.o'); print('x.cc:1: error: boom'); exit(2)"
    log = tmp_path / "build.log"
    with pytest.raises(
        build.BuildError, match=r"x\.cc:1: error: boom[\s\S]*full log: .*build\.log"
    ):
        build._run_logged(
            [sys.executable, "-c", script], tmp_path, dict(os.environ), log
        )


def test_progress_reads_ninja_and_make(capsys):
    progress = build._Progress(interactive=True)
    progress.feed("[12/80] Building CXX object horovod/torch/ops.cc.o\n")
    progress.feed("[ 45%] Building CXX object gloo.cc.o\n")
    shown = capsys.readouterr().out
    assert " 15 %" in shown
    assert " 45 %" in shown
    assert "ops.cc.o" in shown


def test_wanting_what_is_not_there(monkeypatch, capsys):
    with pytest.raises(build.BuildError, match="expected jax"):
        environment.detect(["jax"])
    monkeypatch.setattr(environment, "scripts_path", lambda: "/nonexistent")
    with pytest.raises(build.BuildError, match="expected mpicxx on PATH"):
        environment.detect(["torch"], mpi=True)
    with pytest.raises(build.BuildError, match="expected cmake"):
        build._cmake()
    assert cli.main(["build", "--frameworks", "jax"]) == 1
    assert "or torch,tensorflow, but got" in capsys.readouterr().err


def test_installed_horovod_is_ours():
    assert (
        metadata.version("horovod")
        == f"{sources.HOROVOD_VERSION}+{build.LOCAL_VERSION}"
    )
    assert Path(sources.NATIVE, "cmake", "inject.cmake").exists()


def test_a_library_that_does_not_load_is_named(tmp_path):
    library = tmp_path / "horovod" / "torch" / "mpi_lib_v2.so"
    library.parent.mkdir(parents=True)
    library.write_text("not a library" * 99)
    (tmp_path / "horovod" / "__init__.py").touch()
    words = [sys.executable, "-m", "adasum_hvd.horovod.preflight"]
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    loaded = subprocess.run(
        words, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert loaded.returncode == 1
    assert re.fullmatch(r"torch: .*invalid ELF header\n", loaded.stdout)


def offline(monkeypatch, cache: Path) -> None:
    """Keep pip, here and in subprocesses, from every index."""
    monkeypatch.setenv("ADASUM_HVD_CACHE", str(cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_doctor_wants_no_compiler_where_the_op_is(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-m", "adasum_hvd", "doctor", "--no-reduce"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"CXX": str(tmp_path / "none")},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stdout
    assert re.search(
        r"^ok +prerequisite, only to build again +a C\+\+17", shown.stdout, re.M
    )
    assert re.search(r"^ok +Horovod +0\.28\.1\+adasum", shown.stdout, re.M)
    assert "MISSING" not in shown.stdout


def test_without_an_index_the_build_says_what_to_do(monkeypatch, tmp_path, capsys):
    offline(monkeypatch, tmp_path)
    assert cli.main(["build", "--frameworks", "torch", "--no-install"]) == 1
    output = capsys.readouterr().err
    assert re.fullmatch(
        r"adasum-hvd build: horovod-0\.28\.1\.tar\.gz: expected a download, but got: ERROR: "
        rf"No matching .*; check the network .* put the file into {tmp_path}\n",
        output,
    )


def test_a_wheel_that_pip_refuses(monkeypatch, tmp_path, capsys):
    offline(monkeypatch, tmp_path)
    wheel = tmp_path / "horovod-0.28.1-py2-none-any.whl"
    wheel.touch()
    monkeypatch.setattr(build, "build", lambda *args, **options: wheel)
    assert cli.main(["build"]) == 1
    output = capsys.readouterr().err
    assert re.search(
        r"py2-none-any\.whl: expected to be installed in .*, but got: ERROR: .* not a "
        r"supported wheel.*; fix that and run `adasum-hvd build` again\n$",
        output,
    )


def test_an_interrupted_extraction_is_not_reused(monkeypatch, tmp_path):
    name, archive = f"horovod-{sources.HOROVOD_VERSION}", tmp_path / "sdist.tar.gz"
    (tmp_path / name).mkdir()
    (tmp_path / name / "setup.py").write_bytes(os.urandom(100_000))
    (tmp_path / name / "last.cc").write_bytes(os.urandom(1_000_000))
    with tarfile.open(archive, "w:gz") as file:
        for part in ("setup.py", "last.cc"):
            file.add(tmp_path / name / part, f"{name}/{part}")
    monkeypatch.setattr(sources, "_fetch_sdist", lambda directory: archive)
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    root = tmp_path / "root"
    with pytest.raises(EOFError):
        sources.source_tree(root)
    archive.write_bytes(whole)
    tree = sources.source_tree(root)
    assert (tree / "last.cc").stat().st_size == 1_000_000
    assert not (root / "partial").exists()


def test_a_build_extracts_while_it_holds_its_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    extracted = threading.Event()

    def extract(archive: Path, tree: Path) -> None:
        extracted.set()

    monkeypatch.setattr(sources, "_fetch_sdist", lambda directory: tmp_path)
    monkeypatch.setattr(sources, "_extract", extract)
    monkeypatch.setattr(sources, "cache_dir", lambda: tmp_path / "cache")
    root = tmp_path / "cache" / "build" / "key"
    with sources.locked(root):  # as build() does
        threading.Thread(target=sources.source_tree, args=(root,), daemon=True).start()
        assert extracted.wait(30), "it waits for itself"


def working_in(folder: Path) -> list[str]:
    """Return the names of the programs whose folder is in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (process / "cwd").resolve().is_relative_to(folder):
                found.append((process / "comm").read_text().strip())
    return found


def test_a_build_that_a_signal_ends_leaves_no_compiler(tmp_path: Path) -> None:
    sdist = sources.cache_dir() / f"horovod-{sources.HOROVOD_VERSION}.tar.gz"
    if not sdist.exists():
        pytest.skip("Horovod's source is not here")
    shutil.copy(sdist, tmp_path)
    words = [sys.executable, "-m", "adasum_hvd", "build", "--frameworks", "torch"]
    process = subprocess.Popen(
        [*words, "--no-mpi", "--no-install"],
        env=os.environ | {"ADASUM_HVD_CACHE": str(tmp_path)},
    )
    limit = time.monotonic() + 300
    while not any("cc1plus" in name for name in working_in(tmp_path)):
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not working_in(tmp_path)
