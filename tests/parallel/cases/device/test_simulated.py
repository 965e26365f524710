"""AdaSum of device tensors, on every rank of a real job whose devices are simulated."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from adasum_hvd import reference
from adasum_hvd.horovod import binding
from adasum_hvd.monitor import statistics
from tests.parallel.harness import expected_records
from tests.parallel.harness.simulated_horovod import Horovod

SIZES = (1, 0, 7, 4096, 300, 4097, 100_003, 8)
TOLERANCE = {"float16": 2**-10, "float32": 1e-6, "float64": 1e-9}
hvd = Horovod(Path(os.environ["ADASUM_SIMULATED_HOROVOD"]))
HOSTS: list[int] = []


def init() -> None:
    evens = range(0, int(os.environ["HOROVOD_SIZE"]), 2)
    hvd.init([evens] if int(os.environ["HOROVOD_SIZE"]) > 2 else [])


def start() -> None:
    # Ranks are placed host by host.
    slots = os.environ.get("ADASUM_TEST_HOSTS", str(hvd.size()))
    for host, ranks in enumerate(slots.split(",")):
        HOSTS.extend([host] * int(ranks))
    assert HOSTS.count(HOSTS[hvd.rank()]) == hvd.local_size()


def align() -> None:
    hvd.adasum(np.zeros(1, np.float32), device=-1)


def array_of(rank: int, size: int, dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, rank, size]).standard_normal(size).astype(dtype)


def reference_of(
    inputs: list[np.ndarray], ranks: list[int] | None = None
) -> np.ndarray:
    wide = [a if a.dtype == np.float64 else a.astype(np.float32) for a in inputs]
    return reference.adasum(
        wide,
        [HOSTS[rank] for rank in (range(hvd.size()) if ranks is None else ranks)],
        os.environ.get("ADASUM_HVD_GROUP_OP", "adasum"),
        int(os.environ.get("ADASUM_HVD_GROUP_SIZE", "0")),
    )


def check_close(got: np.ndarray, expected: np.ndarray) -> None:
    if got.size:
        error = np.abs(got.astype(np.float64) - expected).max()
        largest = max(np.abs(expected).max(), 0.3 if got.size < 100 else 0.0)
        assert error <= TOLERANCE[str(got.dtype)] * largest, f"error {error / largest}"


def case_every_dtype_and_size() -> str:
    """The digest of all results: the same on all ranks, and in every form of a job."""
    digest = hashlib.sha256()
    for dtype in TOLERANCE:
        mine = [array_of(hvd.rank(), size, dtype) for size in SIZES]
        together = hvd.adasum(*mine)
        for size, result in zip(SIZES, together, strict=True):
            check_close(
                result,
                reference_of([array_of(r, size, dtype) for r in range(hvd.size())]),
            )
            (alone,) = hvd.adasum(array_of(hvd.rank(), size, dtype))
            assert np.array_equal(alone, result), "fused differs from unfused"
            digest.update(result.tobytes())
    return digest.hexdigest()


def case_host_tensors_next_to_device_tensors() -> str:
    """The host's op in the same process; the two differ in the order of sums."""
    mine = array_of(hvd.rank(), 5000, "float32", 2)
    (host,) = hvd.adasum(mine, device=-1)
    (device,) = hvd.adasum(mine)
    check_close(host, device)
    return binding.transport_description(hvd.library)


def case_factors_on_any_hosts() -> None:
    """Horovod divides AdaSum of device tensors by the ranks on a host; here nothing is."""
    mine = array_of(hvd.rank(), 6000, "float32", 3)
    (plain,) = hvd.adasum(mine)
    (scaled,) = hvd.adasum(mine, prescale=0.5, postscale=0.5)
    assert np.array_equal(scaled, plain * np.float32(0.25))
    (third,) = hvd.adasum(mine, postscale=1 / 3)
    check_close(third, plain.astype(np.float64) / 3)


def case_identical_stay_and_orthogonal_add_up() -> None:
    same = array_of(0, 20_000, "float32", 4)
    (result,) = hvd.adasum(same)
    if os.environ.get("ADASUM_HVD_GROUP_OP") != "sum":
        assert np.array_equal(result, same)
    disjoint = np.zeros(20_000, np.float32)
    disjoint[hvd.rank() :: hvd.size()] = same[hvd.rank() :: hvd.size()]
    (result,) = hvd.adasum(disjoint)
    if "ADASUM_HVD_GROUP_OP" not in os.environ:
        assert np.array_equal(result, same)


def case_cancelling_pairs_keep_their_digits() -> None:
    noise = 1e-7

    def opposite(rank: int) -> np.ndarray:
        base = array_of(rank // 2, 50_000, "float32", 5)
        sign = 1 if rank % 2 == 0 else -1
        return sign * base + noise * array_of(rank, 50_000, "float32", 6)

    before = hvd.counters()
    (result,) = hvd.adasum(opposite(hvd.rank()).astype(np.float32))
    inputs = [opposite(rank).astype(np.float32) for rank in range(hvd.size())]
    expected = reference_of(inputs)
    error = np.abs(result - expected).max() / np.abs(expected).max()
    assert error <= 1e-6 + 10 * 2**-52 / noise, error
    after = hvd.counters()
    assert after.calls == before.calls + 1
    # The device counts in memory that the host reads. A tree is walked where a pair that
    # cancels is an inner node: of more than two ranks, all in one level, neighbours paired.
    walked = after.explicit_tensors > before.explicit_tensors
    (anywhere,) = hvd.adasum(np.full(1, float(walked)), device=-1)
    if hvd.size() < 3 or (
        set(HOSTS) == {0} and "ADASUM_HVD_GROUP_OP" not in os.environ
    ):
        assert bool(anywhere[0]) == (hvd.size() > 2)


def case_observed_tensors() -> None:
    """The monitor's facts from the device's Gram matrices, summed over the ranks."""
    names = [f"recorded.{k}" for k in range(len(SIZES))]
    mine = [array_of(hvd.rank(), size, "float32", 9) for size in SIZES]
    for round_number in (1, 2):
        for name in names:
            binding.request_record(hvd.library, name)
        hvd.adasum(*mine, names=names)
        found = [binding.latest_record(hvd.library, name) for name in names]
        assert all(one is not None and one.number == round_number for one in found)
    hvd.adasum(*mine, names=names)  # nobody has asked for
    assert binding.latest_record(hvd.library, names[0]).number == 2
    sizes = found[0].sizes
    assert bool(sizes) == (hvd.size() > 1)
    folder = Path(sys.argv[2])  # the launch's
    np.save(folder / f"{hvd.rank()}.npy", np.stack([one.rows for one in found]))
    align()
    rows = sum(np.load(folder / f"{rank}.npy") for rank in range(hvd.size()))
    if not sizes:
        assert rows.size == 0
        return
    tensors = statistics.statistics(rows, sizes)
    path = binding.transport_description(hvd.library).split("devices: ")[-1]
    for index, size in enumerate(SIZES):
        if size < 2:
            continue
        vectors = [array_of(rank, size, "float32", 9) for rank in range(hvd.size())]
        expected_records.check(
            {"it": {what: values[index] for what, values in tensors.items()}},
            {"it": vectors},
            HOSTS,
            path,
        )


def case_wrong_dtype_and_then_right() -> None:
    with pytest.raises(
        ValueError, match=r"expected dtype float16.*but got int32; cast it"
    ):
        hvd.adasum(np.ones(10, np.int32), names=["wrong"])
    mine = array_of(hvd.rank(), 100, "float32", 7)
    (result,) = hvd.adasum(mine, names=["right"])
    check_close(
        result,
        reference_of([array_of(r, 100, "float32", 7) for r in range(hvd.size())]),
    )


def case_bfloat16_by_its_name() -> None:
    """Float16 to Horovod, which fuses it with what is float16."""

    def bits_of(rank: int) -> np.ndarray:
        floats = array_of(rank, 9000, "float32", 14)
        return (floats.view(np.uint32) >> 16).astype(np.uint16)

    def floats_of(bits: np.ndarray) -> np.ndarray:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    mine = bits_of(hvd.rank()).view(np.float16)
    halves = array_of(hvd.rank(), 9000, "float16", 15)
    marked = hvd.enqueue([mine], ["adasum.bfloat16/one"])
    plain = hvd.enqueue([halves], ["one"])
    (brain,), (half,) = hvd.wait(marked), hvd.wait(plain)
    expected = reference_of([floats_of(bits_of(rank)) for rank in range(hvd.size())])
    error = np.abs(floats_of(brain.view(np.uint16)) - expected).max()
    assert error <= 2**-7 * np.abs(expected).max()
    check_close(
        half,
        reference_of([array_of(r, 9000, "float16", 15) for r in range(hvd.size())]),
    )


def case_segments_and_their_size() -> None:
    """A flat bucket gets the coefficients of its parameters."""
    sizes = [5000, 7, 30_000]
    mine = [array_of(hvd.rank(), size, "float32", 8) for size in sizes]
    apart = hvd.adasum(*mine)
    bucket = binding.segmented("bucket", sizes)
    (flat,) = hvd.adasum(np.concatenate(mine), names=[bucket])
    assert np.array_equal(flat, np.concatenate(apart))
    with pytest.raises(
        ValueError, match="expected segments of 10 elements in total, but got 35007"
    ):
        hvd.adasum(np.zeros(10, np.float32), names=[bucket])


def case_changes_of_weights() -> None:
    sizes = [5000, 3, 20_000]
    before = [array_of(0, size, "float32", 9) for size in sizes]
    change = [
        np.float32(0.01) * array_of(hvd.rank(), size, "float32", 10) for size in sizes
    ]
    newer = [b + c for b, c in zip(before, change, strict=True)]
    reduced = hvd.adasum(*[n - b for n, b in zip(newer, before, strict=True)])
    expected = [
        (b.astype(np.float64) + r).astype(np.float32)
        for b, r in zip(before, reduced, strict=True)
    ]
    flat = np.concatenate(before)
    # As a framework would: the start lies in the tensor, which this adapter fills first.
    output = np.empty_like(flat)
    name = binding.segmented("adasum.delta/weights", sizes)
    addresses = [array.ctypes.data for array in newer]
    binding.register_weights(hvd.library, name, output.ctypes.data, sizes, addresses)
    counted = hvd.counters().delta_tensors
    (unchanged,) = hvd.wait(hvd.enqueue([flat], [name], outputs=[output]))
    binding.forget_weights(hvd.library, name)
    assert np.array_equal(unchanged, flat)
    for got, right in zip(newer, expected, strict=True):
        assert np.array_equal(got, right)
    assert hvd.counters().delta_tensors == counted + 3


def case_many_at_once() -> None:
    started = []
    for k in range(40):
        mine = array_of(hvd.rank(), 200 * k + 1, "float32", 100 + k)
        started.append(hvd.enqueue([mine], [f"many.{k}"]))
    for k, one in enumerate(started):
        (result,) = hvd.wait(one)
        inputs = [
            array_of(r, result.size, "float32", 100 + k) for r in range(hvd.size())
        ]
        check_close(result, reference_of(inputs))


def case_process_set() -> None:
    if hvd.size() < 3:
        pytest.skip("needs 3 ranks")
    evens = list(range(0, hvd.size(), 2))
    if hvd.rank() % 2 == 0:
        mine = array_of(hvd.rank(), 9000, "float32", 11)
        (result,) = hvd.adasum(mine, names=["evens"], process_set=1)
        check_close(
            result,
            reference_of([array_of(r, 9000, "float32", 11) for r in evens], evens),
        )


def case_non_finite() -> None:
    mine = array_of(hvd.rank(), 5000, "float32", 12)
    if hvd.rank() == 0:
        mine[17] = np.inf
    (result,) = hvd.adasum(mine)
    assert not np.isfinite(result[17 if hvd.size() == 1 else slice(None)]).any()


def case_join() -> None:
    """The last case: ranks that have joined contribute zeros."""
    if hvd.rank() > 0:
        mine = array_of(hvd.rank(), 5000, "float32", 13)
        (result,) = hvd.adasum(mine, names=["joined"])
        inputs = [array_of(r, 5000, "float32", 13) for r in range(hvd.size())]
        inputs[0][:] = 0
        check_close(result, reference_of(inputs))
    hvd.join()
