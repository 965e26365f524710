"""Horovod internals that this project uses: a new Horovod must fail here first."""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import sys

import horovod
import pytest
from horovod.torch import mpi_ops

import adasum_hvd.torch as hvd
from adasum_hvd.base import ops
from adasum_hvd.horovod import binding
from adasum_hvd.horovod.build import sources
from adasum_hvd.torch import wire


def test_version():
    assert horovod.__version__ == "0.28.1"


def test_numbers_of_reductions():
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(mpi_ops, name) == getattr(ops, name) == getattr(hvd, name)


def test_library_functions_and_handle_map():
    for kind in ("", "grouped_"):
        for dtype in ("HalfTensor", "FloatTensor", "DoubleTensor", "IntTensor"):
            assert hasattr(
                mpi_ops.mpi_lib, f"horovod_torch_{kind}allreduce_async_torch_{dtype}"
            )
    assert isinstance(mpi_ops._handle_map, dict)
    source = inspect.getsource(mpi_ops.synchronize)
    assert "_handle_map.pop(handle)[-1]" in source
    assert "horovod_torch_wait_and_clear" in source


def test_all_names_of_horovod_torch_exist():
    public = {name for name in vars(horovod.torch) if not name.startswith("_")}
    assert public <= set(vars(hvd))


def test_the_op_has_a_version_and_settings():
    assert binding.has_op(wire.LIBRARY)
    assert binding.version(wire.LIBRARY)
    assert binding.settings(wire.LIBRARY)["op"] == "on"


def test_a_new_process_has_reduced_nothing():
    script = """
from horovod.torch import mpi_ops
from adasum_hvd.horovod import binding
from adasum_hvd.torch.wire import LIBRARY
print(mpi_ops._handle_map, *binding.counters(LIBRARY))
"""
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["{}", *["0"] * len(binding.Counters._fields)]


def test_without_nccl_nothing_is_reduced_on_devices():
    if hvd.nccl_built():
        pytest.skip("this Horovod has NCCL")
    assert binding.reduces_on_devices(wire.LIBRARY) is False


def source_of(name: str) -> str:
    """Return a file of Horovod's common/."""
    trees = sorted(sources.cache_dir().glob(f"**/horovod-{sources.HOROVOD_VERSION}"))
    if not trees:
        pytest.skip("Horovod's source is not unpacked here")
    return (trees[0] / "horovod" / "common" / name).read_text()


def test_process_sets_end_where_horovod_internals_h_ends_them():
    """Horovod has one call of the cycle, and one that removes a process set from the table."""
    operations = source_of("operations.cc")
    (cycle,) = re.findall(r"(\S+)->ComputeResponseList\(([^)]*)\)", operations)
    assert cycle[0] == "process_set.controller"
    assert re.sub(r"\s+", " ", cycle[1]).endswith(", state, process_set")
    ends = re.findall(r"process_set_table\.Finalize\(\w+,\s+(\w+)\);", operations)
    assert ends == ["SHUT_DOWN_ERROR", "SHUT_DOWN_ERROR"]
    table = source_of("process_set.cc")
    assert "id_to_process_set_[id_to_be_removed_].Finalize(removal_status);" in table
    assert "void ProcessSetTable::DeregisterProcessSet(int32_t process_set_id)" in table


def test_only_the_shutdown_by_the_script_tests_a_thread():
    """From which horovod_internals.h concludes that the script has ended."""
    operations = source_of("operations.cc")
    assert len(re.findall(r"joinable\(\)", operations)) == 1
    (body,) = re.findall(
        r"^void horovod_shutdown\(\) \{\n(.*?)^}", operations, re.M | re.S
    )
    assert "horovod_global.background_thread.joinable()" in body.splitlines()[0]


def test_local_size_divides_only_the_factor_that_horovod_internals_h_leaves_undivided():
    """Horovod's source: three uses of GetLocalSize, of which one divides a factor."""
    source = source_of("operations.cc")
    uses = re.findall(r"(\S+ \S+) \S*GetLocalSize\(\);", source)
    assert sorted(uses) == ["local_size =", "postscale_factor /="]
    assert len(re.findall(r"GetLocalSize\(\)", source)) == 3
    assert "return horovod_global.global_controller->GetLocalSize();" in source


def test_ranks_of_several_hosts_meet_under_a_number_that_horovod_internals_h_changes():
    source = source_of("gloo/gloo_context.cc")
    scopes = re.findall(r"HOROVOD_GLOO_CROSS_PREFIX(.*?)[,;]", source, re.S)
    assert [re.sub(r"\s+", "", scope) for scope in scopes] == [
        "+std::to_string(local_rank)",
        "+std::to_string(local_rank)+process_set_suffix",
    ]


def test_a_horovod_without_the_op_is_refused():
    with pytest.raises(
        RuntimeError, match=r"expected a Horovod built with.*run `adasum-hvd build`"
    ):
        binding.require_op(ctypes.CDLL("libc.so.6"))


def test_bad_settings_are_refused(monkeypatch):
    for name, value in [
        ("ADASUM_HVD_GROUP_OP", "mean"),
        ("ADASUM_HVD_GROUP_SIZE", "-1"),
        ("ADASUM_HVD_CHUNK_BYTES", "12k"),
        ("ADASUM_HVD_KERNELS", "sse9"),
        ("ADASUM_HVD_OP", "maybe"),
    ]:
        with monkeypatch.context() as context:
            context.setenv(name, value)
            with pytest.raises(
                ValueError, match=f'{name}: expected .*, but got "{value}"'
            ):
                binding.require_op(wire.LIBRARY)


def test_no_module_hides_a_function_of_horovod():
    import types

    import horovod.torch

    import adasum_hvd.torch

    for name, value in vars(horovod.torch).items():
        if callable(value):
            ours = getattr(adasum_hvd.torch, name, None)
            assert not isinstance(ours, types.ModuleType), name
