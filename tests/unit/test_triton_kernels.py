"""The kernels for CUDA tensors, in Triton's interpreter on CPU tensors, and compiled for a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton: make triton", allow_module_level=True)
assert "triton" not in sys.modules, "imported before its interpreter was asked for"
os.environ["TRITON_INTERPRET"] = "1"
import adasum_hvd.distributed.triton_kernels  # noqa: E402, F401

del os.environ["TRITON_INTERPRET"]

from adasum_hvd import reference  # noqa: E402
from adasum_hvd.distributed import adasum_all_reduce, device_slice, exchange  # noqa: E402
from adasum_hvd.distributed.blocks import Slice  # noqa: E402
from adasum_hvd.distributed.coefficients import tree_of  # noqa: E402
from adasum_hvd.distributed.device_slice import DeviceSlice, program  # noqa: E402
from adasum_hvd.distributed.slices import BLOCK_ELEMENTS, layout_of  # noqa: E402
from tests.parallel.harness import threads  # noqa: E402
from tests.parallel.harness.conformance import TOLERANCE, tensor_of  # noqa: E402

SIZES = (5, BLOCK_ELEMENTS + 3, 0, 1, BLOCK_ELEMENTS)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SUMS = 1e-14  # of the largest sum: additions in other orders
HOSTS = {1: (0,), 2: (0, 0), 3: (0, 0, 1), 5: (0, 1, 1, 1, 0), 8: (0,) * 8, 9: (0,) * 9}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def rows_of(ranks: int, dtype: torch.dtype, sizes=SIZES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return list(torch.randn(ranks, sum(sizes), generator=generator).to(dtype).unbind())


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def both(rows: list[torch.Tensor], sizes=SIZES) -> tuple[Slice, DeviceSlice]:
    runs = layout_of(tuple(sizes), 1).runs[0]
    return Slice(rows, runs), DeviceSlice(rows, runs)


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert ((found - expected).abs() <= SUMS * expected.abs().amax()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 9])
def test_gram_matrices_are_those_of_torch(ranks: int, dtype: torch.dtype) -> None:
    parts = both(rows_of(ranks, dtype))
    scaled = dtype == torch.float64
    factors = random(len(SIZES), ranks) if scaled else None
    count = len(SIZES)
    sums = (exchange.sums_by_tensor(p.gram(factors), p.owners, count) for p in parts)
    check_close(*(found.sum(1) for found in sums))
    found = [
        torch.zeros(len(SIZES), dtype=torch.float64).scatter_reduce_(
            0, part.owners, part.largest().flatten(), "amax"
        )
        for part in parts
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("hosts", HOSTS.values())
@pytest.mark.parametrize("group_op", ["adasum", "average", "sum"])
def test_nodes_are_those_of_torch(hosts: tuple[int, ...], group_op: str) -> None:
    tree, ranks = tree_of(hosts, group_op, 0), len(hosts)
    by_torch, by_kernels = both(rows_of(ranks, torch.float32, (700, 3)), (700, 3))
    sides = [random(2, len(tier.left), 2) for tier in tree.tiers]
    for tier in range(1, len(tree.tiers)):
        for factors in (None, random(2, ranks)):
            words = tree, sides[:tier], factors, torch.tensor([True, False])
            expected = by_torch.node_products(*words)
            expected[1] = 0  # not asked for
            check_close(by_kernels.node_products(*words), expected)


def rounded_once(exact: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether no neighbour of a two-byte number is nearer to the float64."""
    bits = found.view(torch.int16)
    error = (found.double() - exact).abs()
    nearest = [
        ((bits + step).view(found.dtype).double() - exact).abs() for step in (-1, 1)
    ]
    ties = torch.minimum(*nearest) == error
    return bool(
        (error <= torch.minimum(*nearest)).all() and (bits[ties] % 2 == 0).all()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hosts", HOSTS.values())
def test_combined_vectors_are_those_of_torch(hosts, dtype: torch.dtype) -> None:
    """In place; bit by bit, because the order of the tree is the same."""
    rows, ranks = rows_of(len(hosts), dtype), len(hosts)
    tree = tree_of(hosts, "adasum", 0)
    coefficients = random(len(SIZES), ranks)
    scale = torch.exp2(torch.arange(5.0)).double() if dtype == torch.float64 else None
    by_torch, _ = both([row.double() for row in rows])
    expected = torch.empty(len(rows[0]), dtype=torch.float64)
    by_torch.combine(tree, coefficients, scale, expected)
    both(rows)[1].combine(tree, coefficients, scale, rows[-1])
    if dtype.itemsize > 2:
        assert torch.equal(rows[-1], expected.to(dtype))
    else:
        assert rounded_once(expected, rows[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_are_rounded_once(dtype: torch.dtype) -> None:
    """Next to the middle of two numbers, where rounding to float32 first goes to the middle."""
    one, step = 1.0, 2 * torch.finfo(dtype).eps
    tiny, huge = torch.finfo(dtype).smallest_normal / 1024, torch.finfo(dtype).max
    near = [one + step / 4 + 2.0**-40, one + step / 4 - 2.0**-40, one + step / 4]
    values = [
        *near,
        tiny * 1.5,
        tiny / 3,
        1e-300,
        0.0,
        -0.0,
        huge,
        huge * 1.001,
        huge * 2,
    ]
    values += [1e300, float("inf"), float("nan")]
    values += [-value for value in values]
    ones = torch.ones(len(values), dtype=dtype)
    sizes = (1,) * len(values)
    coefficients = torch.tensor(values, dtype=torch.float64)[:, None]
    both([ones], sizes)[1].combine(tree_of((0,), "adasum", 0), coefficients, None, ones)
    expected = [round_exactly(value, dtype) for value in values]
    assert torch.equal(
        ones.nan_to_num(7.0, float("inf"), float("-inf")),
        torch.tensor(expected, dtype=dtype).nan_to_num(7.0, float("inf"), float("-inf")),
    )  # fmt: skip
    assert torch.equal(ones.signbit()[:-1], coefficients[:-1, 0].signbit())


def round_exactly(value: float, dtype: torch.dtype) -> float:
    """Round to the nearest, to even in the middle, by fractions."""
    if value != value or abs(value) == float("inf"):
        return value
    info = torch.finfo(dtype)
    unit = Fraction(info.smallest_normal) * Fraction(info.eps)
    while abs(Fraction(value)) / unit >= 2 / Fraction(info.eps):
        unit *= 2
    found = round(Fraction(value) / unit) * unit
    return (
        float(found)
        if abs(found) <= info.max
        else float("inf") * (1 if value > 0 else -1)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_buffer(dtype: torch.dtype) -> None:
    """A tensor alone, among others, at any address, and as one of the rows of a slice."""
    ranks, tree = 3, tree_of((0,) * 3, "adasum", 0)
    together = rows_of(ranks, dtype)
    together[1][0] = float("nan")
    factors = random(len(SIZES), ranks)
    scaled = factors if dtype == torch.float64 else None
    _, part = both(together)
    grams, result = part.gram(scaled), torch.empty_like(together[0])
    part.combine(tree, factors, None, result)
    at = 0
    for number, size in enumerate(SIZES):
        for shift in (0, 1):
            own = [torch.empty(size + shift, dtype=dtype)[shift:] for _ in together]
            for row, to in zip(together, own, strict=True):
                to.copy_(row[at : at + size])
            alone = DeviceSlice(own, layout_of((size,), 1).runs[0])
            gram = alone.gram(None if scaled is None else scaled[[number]])
            expected = grams[part.owners == number]
            assert torch.equal(gram.nan_to_num(7.0), expected.nan_to_num(7.0))
            alone.combine(tree, factors[[number]], None, own[0])
            assert torch.equal(
                own[0].nan_to_num(7.0), result[at : at + size].nan_to_num(7.0)
            )
        at += size
    assert not result[SIZES[0] :].isnan().any()


@pytest.mark.parametrize("ranks", [3, 9])
def test_identical_vectors_have_identical_products(ranks: int) -> None:
    vector = torch.randn(300)
    part = DeviceSlice([vector] * ranks, layout_of((300,), 1).runs[0])
    products = part.gram(None)
    assert torch.equal(products, products[:, :1].expand_as(products))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_reductions_of_ranks(
    ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole reductions by the kernels; the last tensor's pairs nearly cancel."""
    sizes, noise = (7, BLOCK_ELEMENTS + 100, 60), 1e-2
    started, lock, start = [], threading.Lock(), DeviceSlice._start

    def in_turn(self: DeviceSlice, kernel, *words, **constants) -> None:
        with lock:  # the interpreter serves one thread
            started.append(kernel.fn.__name__)
            start(self, kernel, *words, **constants)

    monkeypatch.setattr(DeviceSlice, "_start", in_turn)
    monkeypatch.setattr(DeviceSlice, "devices", ("cpu",))
    monkeypatch.setattr(exchange, "WAITING", ())  # as on a device

    def tensors_of(rank: int) -> list[torch.Tensor]:
        scale = 1e200 if dtype == torch.float64 else 1.0
        own = [tensor_of(rank, size, dtype, 1, scale) for size in sizes]
        opposite = tensor_of(rank // 2, sizes[-1], torch.float64, 2, 1 - 2 * (rank % 2))
        own[-1] = (opposite + noise * own[-1].double() / scale).to(dtype)
        return own

    def rank_main(rank: int) -> list[torch.Tensor]:
        own = tensors_of(rank)
        adasum_all_reduce(own)
        return own

    found = threads.run(ranks, "cpu", rank_main)
    kernels = {"gram_kernel", "combine_kernel"}
    kernels |= {"nodes_kernel"} if ranks > 2 else set()
    kernels |= {"largest_kernel"} if dtype == torch.float64 else set()
    assert set(started) == kernels
    for number in range(len(sizes)):
        inputs = [tensors_of(rank)[number].double().numpy() for rank in range(ranks)]
        expected = reference.adasum(inputs)
        assert all(torch.equal(own[number], found[0][number]) for own in found)
        error = np.abs(found[0][number].double().numpy() - expected).max()
        assert error <= TOLERANCE[dtype] * np.abs(expected).max()


def test_programs_hold_few_vectors() -> None:
    """In postfix order the stack has as many as the tree has tiers, and one."""
    tree = tree_of((0,) * 16, "adasum", 0)
    depth = most = 0
    for step in program(tree, len(tree.tiers), 0, True):
        depth += 1 if step >= 0 else -1
        most = max(most, depth)
    assert (depth, most) == (1, 5)


def test_reasons_for_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv(device_slice.SETTING, "off")
    device_slice.why_not.cache_clear()
    expected = "torch's operations (ADASUM_HVD_TRITON=off)"
    assert device_slice.described(cpu) == expected
    for turn_on in (
        lambda: monkeypatch.delenv(device_slice.SETTING),
        lambda: monkeypatch.setenv(device_slice.SETTING, "1"),
    ):
        turn_on()
        device_slice.why_not.cache_clear()
        assert device_slice.described(cpu) == "Triton's kernels"
    monkeypatch.setattr(device_slice, "OLDEST", (99, 0))
    device_slice.why_not.cache_clear()
    assert "is older than 99.0" in device_slice.described(cpu)
    monkeypatch.setattr(device_slice, "OLDEST", (3, 6))
    kernels = DeviceSlice.combine
    for wrong in (torch.Tensor.zero_, torch.Tensor.neg_):  # a device's fault
        monkeypatch.setattr(
            DeviceSlice,
            "combine",
            lambda *a, wrong=wrong: wrong((kernels(*a), a[-1])[1]),
        )
        device_slice.why_not.cache_clear()
        assert "results are not those of torch" in device_slice.described(cpu)
    device_slice.why_not.cache_clear()


@pytest.mark.parametrize(
    "arguments", ["float32 2", "float32 4", "bfloat16 8", "float16 3", "float64 9"]
)
def test_kernels_compile_for_a_gpu(arguments: str, tmp_path: Path) -> None:
    """Without one: registers are not spilled, aligned rows are loaded 16 bytes at a time."""
    command = [sys.executable, "-m", "tests.unit.triton_compiled", *arguments.split()]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"gram_kernel", "combine_kernel"} <= {one["kernel"] for one in kernels}
    for one in kernels:
        assert one["stack"] == 0, one
        exact = one["kernel"] == "gram_kernel" and one["dtype"] != "float64"
        assert (one["fused"] > 0) == exact, one
        if one["kernel"] in ("gram_kernel", "combine_kernel"):
            assert one["wide"] >= min(one["ranks"], 8) - 7 * (one["ranks"] > 8), one
