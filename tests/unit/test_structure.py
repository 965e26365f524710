"""Allowed imports between modules, and includes between the native rooms."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from adasum_hvd.horovod.build.sources import NATIVE, native_files
from tests.parallel.harness.imported import run_script

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "adasum_hvd"
# By room of `adasum_hvd`, the rooms that it imports; all may import `reference` and `__version__`.
ROOMS: dict[str, set[str]] = {
    "base": set(),
    "offload": {"base"},
    "advice": {"base", "monitor"},
    "monitor": {"base"},
    "core": set(),
    "distributed": {"base", "advice", "monitor", "core"},
    "integrations": {"distributed"},
    "horovod": {"base", "advice", "monitor", "core"},
    "parallel": set(),
    "mindspore": {"base", "parallel"},
    "torch": {
        *("base", "advice", "offload", "distributed", "horovod"),
        *("parallel", "mindspore", "monitor"),
    },
    "tensorflow": {
        *("base", "advice", "horovod", "offload"),
        *("parallel", "mindspore", "monitor"),
    },
    "tools": {
        *("base", "advice", "offload", "core", "distributed", "horovod"),
        *("mindspore", "monitor", "torch", "tensorflow"),
    },
}
# The command, and public import paths that only re-export.
DOORS = {
    f"adasum_hvd.{name}"
    for name in (
        *("cli", "boost", "ops", "learning_rate", "mindspore_checkpoint"),
        "adam_offload",
    )
}
FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}
# Files for one framework, by their names.
PER_FRAMEWORK = re.compile(r"(?:mindspore|parallel|tools)/(torch|tensorflow)_\w+\.py")
# By native room, the other rooms or files that it includes. The arithmetic includes only the
# interface of transports; OUTSIDE lists the rooms that include Horovod, MPI, Gloo and NCCL.
INCLUDED: dict[str, set[str]] = {
    "op": {"cuda", "failure", "reduce", "host", "network", "kernels/kernels.h"},
    "failure": {"host", "network", "op/network.h", "op/horovod_internals.h"},
    "cuda": {"reduce", "host/transport.h", "kernels/kernels.h"},
    "network": {"host"},
    # The core, which needs no other room: kernels, hosts, the algorithm and its C interface.
    "kernels": set(),
    "host": set(),
    "reduce": {
        *(
            f"host/{n}.h"
            for n in ("abort_notice", "pause", "shared_memory", "transport")
        ),
        "kernels/kernels.h",
    },
    "capi.cc": {"adasum.h", "reduce", "host", "kernels/kernels.h"},
}
OUTSIDE = {
    "horovod": {"op", "failure", "network"},
    "mpi.h": {"failure", "network"},
    "gloo": {"network"},
    "nccl.h": {"op", "network"},
    "cuda_runtime.h": {"op", "cuda", "network"},
}


def modules() -> dict[str, Path]:
    """Return the package's files by the modules' dotted names."""
    named = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        named[".".join(parts).removesuffix(".__init__")] = path
    return named


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.args[0].value


def packages(name: str) -> set[str]:
    """Return a module's name and those of the packages that Python imports before it."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def graph() -> dict[str, set[str]]:
    """Return, by module, the modules of the package that it imports."""
    known = modules()
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        needed: set[str] = set()
        for name in imported(path):
            needed |= packages(name) & known.keys()
        # The packages that contain a module are already being imported.
        edges[module] = needed - packages(module)
    return edges


def test_imports_have_no_cycle() -> None:
    edges = graph()
    assert len(edges) > 60 and sum(map(len, edges.values())) > 150
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_imports_between_rooms_have_one_direction() -> None:
    for module, needed in graph().items():
        room = module.split(".")[1] if "." in module else ""
        allowed = ROOMS.get(room, set()) | {room}
        used = {name.split(".")[1] for name in needed if "." in name}
        if module in DOORS:
            continue
        assert not (used & ROOMS.keys()) - allowed, (module, used)


def test_only_the_frameworks_rooms_import_a_framework() -> None:
    for module, path in modules().items():
        mine = re.findall(r"^adasum_hvd\.(torch|tensorflow)\b", module)
        rooms = tuple(
            f"adasum_hvd.{name}" for name in ("distributed", "integrations", "offload")
        )
        of_keras = module == "adasum_hvd.offload.keras"
        if module.startswith((*rooms, "adasum_hvd.adam_offload")):
            mine += ["tensorflow" if of_keras else "torch"]
        mine += PER_FRAMEWORK.findall(str(path.relative_to(PACKAGE)))
        for name in imported(path):
            framework = FRAMEWORKS.get(name.split(".")[0])
            assert framework is None or framework in mine, (module, name)


LIBRARIES = {"accelerate", "lightning", "ray", "transformers"}


def test_only_the_integration_of_its_name_imports_a_library() -> None:
    """And nothing imports an integration."""
    integrations = {}
    for module, path in modules().items():
        names = {name.split(".")[0] for name in imported(path)} & LIBRARIES
        if module.startswith("adasum_hvd.integrations."):
            integrations[module.split(".")[-1]] = names
            assert len(path.read_text().splitlines()) <= 100, module
        else:
            assert not names, (module, names)
    assert all(names <= {name} for name, names in integrations.items()), integrations
    assert integrations.keys() == LIBRARIES
    importers = {module for module, needed in graph().items()
                 if any(".integrations" in name for name in needed)}  # fmt: skip
    assert not importers, importers


def test_what_needs_no_horovod() -> None:
    rooms = ("distributed", "offload", "offload.keras")
    names = ", ".join(f"adasum_hvd.{room}" for room in rooms)
    program = (
        f"import sys; sys.modules['horovod'] = None; import {names}; print('imported')"
    )
    assert run_script(program) == "imported\n"


def includes() -> dict[str, list[str]]:
    """Return the includes of each native source and header."""
    found = {}
    for name, path in native_files().items():
        if path.suffix != ".cmake":
            text = path.read_text()
            found[name] = re.findall(r'^ *# *include ["<]([^">]+)[">]', text, re.M)
    return found


def test_includes_have_one_direction() -> None:
    seen = 0
    for path, names in includes().items():
        room = path.split("/")[0]
        for name in names:
            first = name.split("/")[0]
            if first in INCLUDED:
                seen += 1
                assert {name, first} & (INCLUDED[room] | {room}), (path, name)
                assert name in native_files(), (path, name)
            elif first in OUTSIDE:
                assert room in OUTSIDE[first], (path, name)
    assert seen > 80


def test_includes_have_no_cycle() -> None:
    try:
        TopologicalSorter(includes()).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_files_that_the_build_and_the_tests_exclude_exist() -> None:
    """They compile whole folders, except for named files; those names must stay valid."""
    named = r"\b(?:op|failure|reduce|kernels|host|network|cuda)/[\w/]+\.c[cu]\b"
    for path in (NATIVE / "cmake" / "targets.cmake", TESTS / "native" / "rooms.py"):
        excepted = re.findall(named, path.read_text())
        assert len(excepted) > 3
        for name in excepted:
            assert name in native_files(), (path, name)


def test_an_old_torch_is_refused_at_import() -> None:
    program = (
        "import torch; torch.__version__ = '2.3.1+cpu'; import adasum_hvd.distributed"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    expected = (
        "expected torch 2.4 or newer, but got 2.3.1+cpu; pip install 'torch>=2.4'"
    )
    assert f"ImportError: adasum_hvd.distributed: {expected}" in done.stderr
