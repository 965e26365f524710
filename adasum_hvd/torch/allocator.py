"""Settings of glibc's allocator for training on CPUs.

Every backward pass allocates and frees gradients. glibc gives large freed blocks back to the
kernel, which clears their pages when the next pass asks for them: up to a fifth of a step of 25 M
parameters (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_MOST_KEPT = 1 << 30  # bytes of free memory at the end of the heap
_MOST_ON_HEAP = 32 << 20  # bytes of a block; glibc takes no more


def keep_freed_memory() -> bool:
    """Make glibc keep up to 1 GiB of freed memory; return whether it does.

    Nothing happens with another C library or allocator, or if the environment sets the allocator:
    `MALLOC_TRIM_THRESHOLD_` and its relatives, `GLIBC_TUNABLES`.
    """
    ours = not any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    )
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not ours or mallopt is None:
        return False
    # Either call alone would end glibc's own adjustment of the other threshold.
    return bool(mallopt(_MMAP_THRESHOLD, _MOST_ON_HEAP)) and bool(
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
    )
