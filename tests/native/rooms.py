"""The native sources by room, with the flags of the injected CMake."""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path

from adasum_hvd.horovod.build.sources import native_files

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
        parts: folders, with those in them, or files, of the core or of `adasum_hvd/horovod`.
        without: files in these folders that are left out.
    """
    known = native_files()
    found = [
        name
        for part in parts
        for name in known
        if name == part
        or (name.startswith(f"{part}/") and name.endswith((".cc", ".cu")))
    ]
    assert set(without) <= set(found), without
    left_out = {*without, *(() if X86 else _X86_FLAGS)}
    return {known[n]: _X86_FLAGS.get(n, ()) for n in found if n not in left_out}


# What reduces without Horovod, on hosts and on devices.
ARITHMETIC = sources(
    "reduce", "kernels", "host", "failure/heartbeat_monitor.cc", "op/settings.cc"
)
KERNELS = sources("cuda")
# What Horovod calls, over Gloo and NCCL.
OP = sources(
    "op", "reduce", "kernels", "host", "network", "failure", "cuda",
    without=["op/tensorflow_stream.cc", "network/mpi.cc"],
)  # fmt: skip
WITHOUT_HOROVOD = {  # settings.cc knows which of Horovod's backends there are
    path: own
    for path, own in (ARITHMETIC | KERNELS).items()
    if path.name != "settings.cc"
}
SIMULATED_DEVICE = dict.fromkeys(sorted(SIMULATED.glob("*.cc")), ())
