"""Minutes of random reductions, checked against the reference, and memory that does not grow."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

import adasum_hvd.torch as hvd
from adasum_hvd import reference

SECONDS = 120
DTYPES = {torch.float16: 2e-3, torch.float32: 1e-6, torch.float64: 1e-9}
LEAK_BYTES = 64 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _round(generator: np.random.Generator, number: int, sets: list) -> None:
    """Reduce some tensors of one dtype in one process set; every rank draws the same."""
    process_set = sets[generator.integers(len(sets))]
    dtype = list(DTYPES)[generator.integers(len(DTYPES))]
    op = ("adasum", "adasum-grad", "adasum-delta")[generator.integers(3)]
    sizes = (10 ** generator.uniform(0, 5.5, generator.integers(1, 9))).astype(int)
    if not process_set.included():
        return
    ranks = process_set.ranks or list(range(hvd.size()))
    inputs = [
        [
            torch.from_numpy(
                np.random.default_rng([number, rank, k]).standard_normal(size)
            ).to(dtype)
            for k, size in enumerate(sizes)
        ]
        for rank in ranks
    ]
    mine = inputs[list(ranks).index(hvd.rank())]
    handles = [
        hvd.allreduce_async(t.clone(), name=f"{k}", op=op, process_set=process_set)
        for k, t in enumerate(mine)
    ]
    for k, handle in enumerate(handles):
        got = hvd.synchronize(handle).double().numpy()
        wanted = reference.adasum([of_rank[k].double().numpy() for of_rank in inputs])
        error = np.abs(got - wanted).max() / max(np.abs(wanted).max(), 0.3)
        assert error <= DTYPES[dtype], f"round {number}, {op}, {dtype}: error {error}"


def case_random_reductions() -> int:
    sets = [hvd.global_process_set, hvd.add_process_set([0, hvd.size() - 1])]
    generator = np.random.default_rng(12)
    ends, number, resident = time.monotonic() + SECONDS, 0, 0
    while True:
        for _ in range(20):
            _round(generator, number, sets)
            number += 1
        if number == 200:
            resident = _resident_bytes()
        going_on = torch.tensor(float(time.monotonic() < ends))
        if hvd.allreduce(going_on, name="go on", op=hvd.Min) == 0:
            break
    assert number > 200, f"required more than 200 rounds, got {number}"
    grown = _resident_bytes() - resident
    assert grown < LEAK_BYTES, f"{grown} bytes more after {number} rounds"
    return number
