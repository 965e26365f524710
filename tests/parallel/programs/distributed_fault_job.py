"""A rank of a job on torch.distributed of which the last rank ends or stops in a backward pass.

python -m tests.parallel.programs.distributed_fault_job RANK RANKS STORE FAULT SECONDS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd.distributed import AdasumState, adasum_hook
from tests.parallel.harness.models import loss_of, model_of, sgd


def store_of_all(path: str, ranks: int) -> dist.FileStore:
    """Return the group's store when all ranks have imported everything.

    The start has the short time limit of the later waits.
    """
    store = dist.FileStore(path, ranks)
    imported = store.add("imported", 1)
    while imported < ranks:
        time.sleep(0.02)
        imported = store.add("imported", 0)
    return store


def main(rank: int, ranks: int, path: str, fault: int, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=store_of_all(path, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    model = DistributedDataParallel(model_of(), bucket_cap_mb=0.004)
    model.register_comm_hook(AdasumState(), adasum_hook)
    optimizer = sgd(model.parameters())
    for step in range(1000):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        if step == 3 and rank == ranks - 1:
            os.kill(os.getpid(), fault)
        began = time.monotonic()
        try:
            loss.backward()
        except RuntimeError as error:
            print(f"step {step} after {time.monotonic() - began:.1f} s: {error}")
            raise
        optimizer.step()


if __name__ == "__main__":
    number, count, path, name, limit = sys.argv[1:]
    main(int(number), int(count), path, signal.Signals[name], float(limit))
