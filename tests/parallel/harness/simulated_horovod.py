"""Horovod and the op for device tensors on a simulated device, as a library.

Real Horovod (its background thread, Gloo, coordinator and finalizer threads) and the real op
with its kernels, for machines without a device. Only CUDA, NCCL and the framework are
stand-ins; see `tests/native/simulated_horovod.cc` and `simulated_cuda`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adasum_hvd.horovod import binding
from adasum_hvd.horovod.build.sources import CORE, NATIVE, cache_dir, source_tree
from tests.native import compiling, programs, rooms

REPOSITORY = Path(__file__).parents[3]
NATIVE_TESTS = REPOSITORY / "tests" / "native"
ROOM = "tests/horovod"  # in the cache folder
_COMMON = [
    "common", "controller", "fusion_buffer_manager", "group_table", "half",
    "logging", "message", "nvtx_op_range", "operations", "parameter_manager",
    "process_set", "response_cache", "stall_inspector", "tensor_queue",
    "thread_pool", "timeline", "utils/env_parser", "optim/bayesian_optimization",
    "optim/gaussian_process", "gloo/gloo_context", "gloo/gloo_controller",
    "gloo/http_store", "gloo/memory_store", "ops/collective_operations",
    "ops/operation_manager", "ops/gpu_operations", "ops/cuda_operations",
    "ops/nccl_operations", "ops/gloo_operations",
]  # fmt: skip
_GLOO = [
    "algorithm", "allgather", "allgatherv", "allreduce", "allreduce_local",
    "alltoall", "alltoallv", "barrier", "broadcast", "context", "gather", "gatherv",
    "math", "rendezvous/context", "rendezvous/file_store", "rendezvous/hash_store",
    "rendezvous/prefix_store", "rendezvous/store", "scatter", "reduce", "types",
    "common/linux", "common/logging", "transport/address", "transport/buffer",
    "transport/context", "transport/device", "transport/pair",
    "transport/unbound_buffer", "common/memory",
]  # fmt: skip
_BOOST = [
    "assert", "config", "core", "detail", "iterator", "lockfree", "mpl",
    "parameter", "predef", "preprocessor", "static_assert", "type_traits",
    "utility",
]  # fmt: skip
_DEFINES = [
    "EIGEN_MPL2_ONLY=1", "HAVE_CUDA=1", "HAVE_GPU=1", "HAVE_NCCL=1", "HAVE_GLOO=1",
    "HOROVOD_GPU_ALLGATHER=78", "HOROVOD_GPU_ALLREDUCE=78",
    "HOROVOD_GPU_ALLTOALL=78", "HOROVOD_GPU_BROADCAST=78",
    "HOROVOD_GPU_REDUCESCATTER=78",
    # As Horovod is built: its timeline asserts that no rank begins a tensor anew before this
    # one has noted its end, which happens where devices complete on their own threads.
    "NDEBUG",
]  # fmt: skip
_DTYPES = {"float16": 6, "float32": 7, "float64": 8, "int32": 4}  # Horovod's DataType
# Sources of Horovod that the injected CMake changes by op/horovod_internals.h.
_CHANGED = ("operations", "controller", "gloo/gloo_context")


def _gloo_sources(gloo: Path) -> list[Path]:
    found = [path for name in _GLOO if (path := gloo / f"{name}.cc").exists()]
    return [*found, *sorted((gloo / "transport" / "tcp").glob("*.cc"))]


def _configure_gloo(gloo: Path, target: Path) -> Path:
    """Write what CMake would make of Gloo's config.h.in; return the folder to include."""
    text = (gloo / "config.h.in").read_text()
    text = re.sub(r"@GLOO_VERSION_\w+@", "0", text)
    text = re.sub(
        r"#cmakedefine01 (\w+)",
        lambda match: (
            f"#define {match[1]} {int(match[1] == 'GLOO_HAVE_TRANSPORT_TCP')}"
        ),
        text,
    )
    header = target / "gloo" / "config.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.exists() or header.read_text() != text:
        partial = header.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.rename(header)  # at once, because another process may be compiling
    return target


def _flags(tree: Path) -> list[str]:
    """Return the compiler's flags for Horovod's sources."""
    third_party = tree / "third_party"
    includes = [
        tree,
        CORE,
        NATIVE,
        rooms.SIMULATED,
        _configure_gloo(third_party / "gloo" / "gloo", cache_dir() / ROOM),
    ]
    includes += [
        third_party / name
        for name in ("HTTPRequest/include", "lbfgs/include", "gloo", "eigen")
    ]
    includes += [third_party / "boost" / name / "include" for name in _BOOST]
    includes.append(third_party / "flatbuffers" / "include")
    flags = [
        *("-std=c++17", "-O1", "-g1", "-fPIC", "-pthread", "-w"),
        *("-ffp-contract=off", "-Wno-psabi"),
        # As in horovod/cmake/inject.cmake; without NVTX one header lacks <cstdint> anyway.
        *("-include", "cstdint", "-include", "string", "-Wno-template-body"),
    ]
    return flags + [f"-D{name}" for name in _DEFINES] + [f"-I{p}" for p in includes]


def _changed(common: Path) -> dict[Path, tuple[str, ...]]:
    """Return the sources that the op changes, with their flags."""
    internals = str(NATIVE / "op" / "horovod_internals.h")
    return {
        common / f"{name}.cc": (
            *("-DADASUM_IN_HOROVOD", f"-DADASUM_IN_{Path(name).name.upper()}"),
            *("-include", internals),
        )
        for name in _CHANGED
    }


def make() -> Path:
    """Build the library, or return the one of the same sources in the cache folder."""
    tree = source_tree(cache_dir())
    common = tree / "horovod" / "common"
    sources = dict.fromkeys((common / f"{name}.cc" for name in _COMMON), ())
    sources |= _changed(common)
    sources |= dict.fromkeys(_gloo_sources(tree / "third_party" / "gloo" / "gloo"), ())
    sources[NATIVE_TESTS / "simulated_horovod.cc"] = ()
    alone = rooms.WITHOUT_HOROVOD | rooms.SIMULATED_DEVICE
    sources |= {path: own for path, own in rooms.OP.items() if path not in alone}
    compiled = compiling.objects(sources, _flags(tree), ROOM)
    compiled += programs.objects(alone, "plain")
    link = ["-shared", "-pthread", "-Wl,-z,defs"]
    return compiling.linked(compiled, link, ["-ldl"], ROOM, "simulated.so")


def with_mpi(mpi_flags: Sequence[str]) -> list[Path]:
    """Return the objects in which Horovod's AdaSum of NCCL and MPI is used and defined.

    Args:
        mpi_flags: the compiler's, for MPI's headers.
    """
    tree = source_tree(cache_dir())
    common = tree / "horovod" / "common"
    operations = common / "operations.cc"
    sources = {operations: _changed(common)[operations]}
    sources[common / "ops" / "adasum_gpu_operations.cc"] = ()
    flags = [*_flags(tree), "-DHAVE_MPI=1", *mpi_flags]
    return compiling.objects(sources, flags, ROOM)


class Horovod:
    """An interface like `horovod.torch`, for NumPy arrays on the simulated device."""

    def __init__(self, library: Path):
        self.library = ctypes.CDLL(str(library))
        self.library.horovod_simulated_wait.restype = ctypes.c_char_p
        self._nameless = 0

    def init(self, process_sets: Sequence[Sequence[int]] = ()) -> None:
        """Start Horovod's background thread."""
        flat = [rank for ranks in process_sets for rank in ranks]
        sizes = [len(ranks) for ranks in process_sets]
        self.library.horovod_init(
            None, 0, (ctypes.c_int * len(flat))(*flat), (ctypes.c_int * len(sizes))(*sizes),
            len(sizes),
        )  # fmt: skip
        assert self.library.horovod_is_initialized()

    def shutdown(self) -> None:
        """End the background thread."""
        self.library.horovod_shutdown()

    def rank(self) -> int:
        """Return this rank."""
        return self.library.horovod_rank()

    def size(self) -> int:
        """Return the number of ranks."""
        return self.library.horovod_size()

    def local_size(self) -> int:
        """Return the number of ranks on this host."""
        return self.library.horovod_local_size()

    def enqueue(
        self,
        arrays: Sequence[np.ndarray],
        names: Sequence[str] | None = None,
        device: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        outputs: Sequence[np.ndarray] | None = None,
    ) -> tuple[int, list[np.ndarray], list[np.ndarray]]:
        """Start AdaSum of arrays in one group; see `wait`."""
        if names is None:
            self._nameless += 1
            names = [f"nameless.{self._nameless}.{k}" for k in range(len(arrays))]
        outputs = (
            [np.full_like(array, -77) for array in arrays]
            if outputs is None
            else list(outputs)
        )
        count = len(arrays)
        handle = self.library.horovod_simulated_adasum(
            count,
            (ctypes.c_char_p * count)(*(name.encode() for name in names)),
            (ctypes.c_void_p * count)(*(array.ctypes.data for array in arrays)),
            (ctypes.c_void_p * count)(*(output.ctypes.data for output in outputs)),
            (ctypes.c_int64 * count)(*(array.size for array in arrays)),
            _DTYPES[str(arrays[0].dtype)],
            device,
            ctypes.c_double(prescale),
            ctypes.c_double(postscale),
            process_set,
        )
        return handle, outputs, list(arrays)

    def wait(self, started: tuple[int, list, list]) -> list[np.ndarray]:
        """Return the results; ValueError or RuntimeError, as torch's, when there is an error."""
        self._raise_failure(started[0])
        return started[1]

    def _raise_failure(self, handle: int) -> None:
        invalid = ctypes.c_bool()
        wait = self.library.horovod_simulated_wait
        if error := wait(handle, ctypes.byref(invalid)).decode():
            raise (ValueError if invalid else RuntimeError)(error)

    def adasum(self, *arrays: np.ndarray, **options) -> list[np.ndarray]:
        """Return the AdaSum of every array over the ranks."""
        return self.wait(self.enqueue(arrays, **options))

    def join(self, device: int = 0) -> None:
        """Contribute zeros until all ranks have joined."""
        self._raise_failure(self.library.horovod_simulated_join(device))

    def counters(self) -> binding.Counters:
        """Return what the op has done."""
        return binding.counters(self.library)
