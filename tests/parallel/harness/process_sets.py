"""Process sets that the cases of one launch share: Horovod registers ranks once only."""

from __future__ import annotations

import functools
from typing import Any

import horovod.torch as hvd


@functools.cache
def of(*ranks: int) -> Any:
    """Return the process set of these ranks, which stays. Collective: every rank of the job."""
    if ranks == tuple(range(hvd.size())):
        return hvd.global_process_set
    return hvd.add_process_set(ranks)
