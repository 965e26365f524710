"""`hvd.join`: ranks that run out of data contribute zeros."""

from __future__ import annotations

import os

import numpy as np
import torch

import adasum_hvd.torch as hvd
from adasum_hvd import reference
from adasum_hvd.base.options import Options
from adasum_hvd.torch.optimizer.buckets import Bucket
from tests.parallel.cases.torch.test_ops import HOSTS
from tests.parallel.cases.torch.test_ops import start as start
from tests.parallel.harness.conformance import check_close, tensor_of


def expected_of(inputs: list[np.ndarray]) -> np.ndarray:
    """Return AdaSum of all ranks' inputs, in this job's groups."""
    group_op = os.environ.get("ADASUM_HVD_GROUP_OP", "adasum")
    group_size = int(os.environ.get("ADASUM_HVD_GROUP_SIZE", "0"))
    return reference.adasum(inputs, HOSTS, group_op, group_size)


def case_join() -> None:
    """Ranks run out of data one after the other."""
    size, rank = hvd.size(), hvd.rank()
    for step in range(rank + 1):
        mine = tensor_of(rank, 3000, torch.float32, 20 + step)
        result = hvd.allreduce(mine, op=hvd.Adasum, name=f"join.{step}")
        inputs = [
            tensor_of(r, 3000, torch.float32, 20 + step).numpy()
            if r >= step
            else np.zeros(3000)
            for r in range(size)
        ]
        expected = expected_of([i.astype(np.float32) for i in inputs])
        check_close(result, expected, torch.float32)
    hvd.join()


def case_join_before_a_bucket_was_made() -> None:
    """A rank that has joined knows a bucket's parameters from its name."""
    sizes, size = (100_003, 7, 300_000), hvd.size()
    buckets = []
    if hvd.rank() > 0:
        named = [
            (str(k), torch.nn.Parameter(tensor_of(hvd.rank(), n, torch.float32, 60)))
            for k, n in enumerate(sizes)
        ]
        everyone = hvd.global_process_set
        options = Options(hvd.AdasumGrad, everyone, hvd.Compression.none)
        bucket = Bucket("new", named, torch.float32, options, everyone)
        bucket.fill([parameter.detach() for _, parameter in named])
        bucket.start()
        bucket.finish()
        buckets.append(bucket)
    hvd.join()
    for bucket in buckets:
        for view, count in zip(bucket.views, sizes, strict=True):
            inputs = [
                tensor_of(r, count, torch.float32, 60).numpy() * np.float32(r > 0)
                for r in range(size)
            ]
            check_close(view, expected_of(inputs), torch.float32)
