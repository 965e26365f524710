"""Memory that glibc keeps between two backward passes, seen in the page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Frees blocks of 16 MiB in the order that makes glibc give memory back: page faults of a round.
_PROGRAM = """
import ctypes, resource
from adasum_hvd.torch.allocator import keep_freed_memory
kept = keep_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [c.malloc(16 << 20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 16 << 20)
    for block in blocks:
        c.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, *faults)
"""
_OTHERS = ("MALLOC_", "GLIBC_TUNABLES")
_PLAIN = {
    name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)
}


def _run(**variables: str) -> tuple[str, list[int]]:
    """Return what `keep_freed_memory` returned, and the page faults of each round."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=_PLAIN | variables,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    kept, *faults = done.stdout.split()
    return kept, [int(count) for count in faults]


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
    reason="needs glibc",
)  # fmt: skip
def test_freed_blocks_stay_with_the_process():
    kept, (first, *others) = _run()
    assert kept == "True"
    assert first > 4 * 4000  # pages of four blocks
    assert max(others) < 100


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}],
    ids=["MALLOC_", "GLIBC_TUNABLES"],
)  # fmt: skip
def test_the_users_own_settings_stay(variables):
    kept, (_, *others) = _run(**variables)
    assert kept == "False"
    assert min(others) > 4000
