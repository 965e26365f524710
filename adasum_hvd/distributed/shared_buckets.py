"""DDP's buckets in memory that the ranks of a host share, so that nothing is copied."""

from __future__ import annotations

import os
import warnings
import weakref

import torch

from adasum_hvd import core

_LEAST_BYTES = 64 << 10  # of a bucket that is worth a mapping of its own


class SharedBuckets:
    """The buckets of one DDP model that have been moved.

    A storage that is found here is kept, so that its address is no other tensor's: DDP keeps its
    buckets as long as its model anyway.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}  # by address
        self._copies = False  # the system has no more such memory

    def address(self, flat: torch.Tensor) -> int | None:
        """Return the core's address of a bucket, which is moved on the first call.

        Returns:
            None if it cannot be moved; this rank then copies, and the others need not know.
        """
        storage = flat.untyped_storage()
        begin, is_long = storage.data_ptr(), storage.nbytes() >= _LEAST_BYTES
        if begin not in self._storages and is_long and not self._copies:
            try:
                begin = self._move(storage)
            except RuntimeError as error:  # of torch's or the core's
                self._copies = True
                warnings.warn(
                    f"adasum_hook: expected memory that the ranks share, but got: {error}; "
                    "leave more of it to the job, or gradients are copied in each step",
                    stacklevel=2,
                )
        if begin not in self._storages:
            return None
        return self._storages[begin][1] + flat.data_ptr() - begin

    # `share_memory_` gives the storage a mapping of its own, which all views of it follow. The
    # core puts its own memory under that mapping, and torch's file is emptied.
    def _move(self, storage: torch.UntypedStorage) -> int:
        storage.share_memory_()
        begin = storage.data_ptr()
        other = core.share(begin, storage.nbytes())
        # torch keeps the storage's Python object as long as the storage.
        weakref.finalize(storage, core.free, other).atexit = False
        self._storages[begin] = storage, other
        os.ftruncate(storage._share_fd_cpu_()[0], 0)
        return begin
