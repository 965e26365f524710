"""The sources of `adasum_hvd/native` by room, with the flags of the injected CMake."""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path

from adasum_hvd.install.sources import NATIVE

SIMULATED = Path(__file__).with_name("simulated_cuda")
X86 = platform.machine() == "x86_64"
_X86_FLAGS = {
    "kernels/avx2.cc": ("-mavx2", "-mfma", "-mf16c"),
    "kernels/avx512.cc": (
        "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq",
        "-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512",
    ),
}  # fmt: skip


def sources(*parts: str, without: Collection[str] = ()) -> dict[Path, tuple[str, ...]]:
    """Return the sources to compile, each with flags of its own.

    Args:
        parts: folders, with those in them, or files, below `adasum_hvd/native`.
        without: files in these folders that are left out.
    """
    found: list[Path] = []
    for part in parts:
        path = NATIVE / part
        found += sorted(path.rglob("*.c[cu]")) if path.is_dir() else [path]
    flags = {NATIVE / name: own for name, own in _X86_FLAGS.items()}
    left_out = {NATIVE / name for name in without}
    assert left_out <= set(found), left_out
    left_out |= set() if X86 else flags.keys()
    return {path: flags.get(path, ()) for path in found if path not in left_out}


# What reduces without Horovod, on hosts and on devices.
ARITHMETIC = sources(
    "reduce", "kernels", "transport", "failure", "op/settings.cc",
    without=[
        "transport/gloo.cc", "transport/mpi.cc", "transport/nccl.cc", "failure/shut_down.cc",
    ],
)  # fmt: skip
KERNELS = sources("cuda")
# What Horovod calls, over Gloo and NCCL.
OP = sources(
    "op", "reduce", "kernels", "transport", "failure", "cuda",
    without=["op/tensorflow_stream.cc", "transport/mpi.cc"],
)  # fmt: skip
WITHOUT_HOROVOD = {  # settings.cc knows which of Horovod's backends there are
    path: own
    for path, own in (ARITHMETIC | KERNELS | sources("transport/nccl.cc")).items()
    if path.name != "settings.cc"
}
SIMULATED_DEVICE = dict.fromkeys(sorted(SIMULATED.glob("*.cc")), ())
