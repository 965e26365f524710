"""AdaSum of torch tensors, on every rank of a real job."""

from __future__ import annotations

import hashlib
import os
import socket

import numpy as np
import pytest
import torch

import adasum_hvd.torch as hvd
from adasum_hvd import reference
from adasum_hvd.horovod import binding
from adasum_hvd.torch.wire import LIBRARY
from tests.parallel.harness import conformance, process_sets
from tests.parallel.harness.conformance import (
    SIZES as SIZES,
)
from tests.parallel.harness.conformance import (
    TOLERANCE as TOLERANCE,
)
from tests.parallel.harness.conformance import (
    Engine,
    check_close,
    reduced,
    tensor_of,
)

EVENS: hvd.ProcessSet
HOSTS: list[str] = []


def start() -> None:
    global EVENS
    if hvd.size() > 1:
        EVENS = process_sets.of(*range(0, hvd.size(), 2))
    note_hosts()


def note_hosts() -> None:
    """Find the host of every rank, on which the tree depends. Collective."""
    HOSTS[:] = hvd.allgather_object(
        os.environ.get("HOROVOD_HOSTNAME", socket.gethostname())
    )


def engine() -> Engine:
    """Return Horovod's op as the conformance table sees it."""
    return Engine(
        hvd.rank(),
        HOSTS,
        lambda tensor, name: hvd.allreduce(tensor, op=hvd.Adasum, name=name),
        lambda tensor, name: hvd.allreduce_(tensor, op="adasum", name=name),
        lambda several, name: hvd.grouped_allreduce(several, op=hvd.Adasum, name=name),
        hvd.allgather_object,
    )


def reference_of(
    size: int, dtype: torch.dtype, ranks, seed: int = 0, scale: float = 1.0
) -> np.ndarray:
    inputs = [tensor_of(r, size, dtype, seed, scale) for r in ranks]
    return reduced(inputs, [HOSTS[r] for r in ranks])


def check_same_everywhere(tensors) -> str:
    return conformance.check_same_everywhere(engine(), tensors)


def case_every_dtype_and_size() -> dict[str, str]:
    return conformance.every_dtype_and_size(engine())


def case_bfloat16_travels_in_two_bytes() -> None:
    mine = tensor_of(hvd.rank(), 10_000, torch.bfloat16, 31)
    before = hvd.counters().bytes
    result = hvd.allreduce(mine, op=hvd.Adasum, name="bits")
    assert hvd.counters().bytes - before == 2 * 10_000
    check_close(
        result,
        reference_of(10_000, torch.bfloat16, range(hvd.size()), 31),
        torch.bfloat16,
    )
    table = mine.view(100, 100).t()
    transposed = hvd.allreduce(table, op=hvd.Adasum, name="bits.transposed")
    assert torch.equal(transposed.t().reshape(-1), result)
    # Horovod fuses them: to it both are float16.
    halves = tensor_of(hvd.rank(), 10_000, torch.float16, 32)
    handles = [
        hvd.allreduce_async(t, op=hvd.Adasum, name=f"bits.{k}")
        for k, t in enumerate((mine, halves, mine[:300], halves[:300]))
    ]
    fused = [hvd.synchronize(handle) for handle in handles]
    assert torch.equal(fused[0], result)
    alone = hvd.allreduce(halves, op=hvd.Adasum, name="bits.alone")
    assert torch.equal(fused[1], alone)
    # In a group with other dtypes it is sent as float32.
    mixed = hvd.grouped_allreduce(
        [mine, mine.float()], op=hvd.Adasum, name="bits.mixed"
    )
    assert mixed[0].dtype == torch.bfloat16
    check_close(
        mixed[0],
        reference_of(10_000, torch.bfloat16, range(hvd.size()), 31),
        torch.bfloat16,
    )
    short = hvd.allreduce(
        mine.float(), op=hvd.Adasum, name="bits.c", compression=hvd.Compression.bf16
    )
    assert torch.equal(short, result.float())


def case_bits_for_tensorflow() -> dict[str, str]:
    """The inputs of tensorflow/test_ops.py, whose bits must be these."""
    digests = {}
    for dtype in (np.float16, np.float32, np.float64):
        digest = hashlib.sha256()
        for size in (1, 7, 4096, 300, 4097, 100_003, 8):
            values = np.random.default_rng([0, hvd.rank(), size]).standard_normal(size)
            mine = torch.from_numpy(values.astype(dtype))
            name = f"bits.{dtype.__name__}.{size}"
            result = hvd.allreduce(mine, op=hvd.Adasum, name=name)
            digest.update(result.numpy().tobytes())
        digests[dtype.__name__] = digest.hexdigest()
    return digests


def case_fused_by_timing() -> None:
    tensors = [tensor_of(hvd.rank(), 50 + k, torch.float32, k) for k in range(24)]
    handles = [
        hvd.allreduce_async(t, op=hvd.Adasum, name=f"timing.{k}")
        for k, t in enumerate(tensors)
    ]
    fused = [hvd.synchronize(handle) for handle in handles]
    for k, tensor in enumerate(tensors):
        alone = hvd.allreduce(tensor, op=hvd.Adasum, name=f"timing.alone.{k}")
        assert torch.equal(alone, fused[k])


def skip_in_groups() -> None:
    if "ADASUM_HVD_GROUP_OP" in os.environ:
        pytest.skip("a property of AdaSum all the way down")


def case_properties() -> None:
    skip_in_groups()  # orthogonal inputs add up, unless groups are averaged
    conformance.properties(engine())


def case_magnitudes() -> None:
    conformance.magnitudes(engine())


def case_not_finite() -> None:
    conformance.not_finite(engine())


def case_cancelling_pairs() -> None:
    skip_in_groups()
    conformance.cancelling_pairs(engine())
    # Levels of two ranks form every node anyway.
    if hvd.size() >= 4 and not case_path().startswith("levels of 2 x 2 "):
        explicit = sum(hvd.allgather_object(hvd.counters().explicit_tensors))
        assert explicit > 0, "the ill-conditioned path never ran"


@pytest.mark.parametrize("dtype_name", ["float32", "float64"])
def case_scale_factors(dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    mine = tensor_of(hvd.rank(), 5000, dtype, 7)
    plain = hvd.allreduce(mine, op=hvd.Adasum, name=f"scale.plain.{dtype}")
    scaled = hvd.allreduce(
        mine,
        op=hvd.Adasum,
        name=f"scale.{dtype}",
        prescale_factor=4.0,
        postscale_factor=0.125,
    )
    assert torch.equal(scaled, plain * 0.5)
    third = hvd.allreduce(
        mine, op=hvd.Adasum, name=f"third.{dtype}", postscale_factor=1 / 3
    )
    check_close(third, plain.double().numpy() / 3, dtype)


def case_process_set() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    if EVENS.included():
        mine = tensor_of(hvd.rank(), 70_000, torch.float32, 8)
        result = hvd.allreduce(mine, op=hvd.Adasum, name="evens", process_set=EVENS)
        check_close(
            result, reference_of(70_000, torch.float32, EVENS.ranks, 8), torch.float32
        )
        small = hvd.allreduce(
            mine[:5], op=hvd.Adasum, name="evens.small", process_set=EVENS
        )
        expected = reference.adasum(
            [tensor_of(r, 70_000, torch.float32, 8)[:5].numpy() for r in EVENS.ranks],
            [HOSTS[r] for r in EVENS.ranks],
        )
        if "ADASUM_HVD_GROUP_OP" not in os.environ:
            np.testing.assert_allclose(small.numpy(), expected, rtol=1e-5, atol=1e-6)
    else:
        with pytest.raises(ValueError, match="not a member"):
            hvd.allreduce(torch.ones(3), op=hvd.Adasum, name="evens", process_set=EVENS)
    # Ranks that have made another number of calls have the same name for this one.
    assert torch.equal(hvd.allreduce(torch.ones(1), op=hvd.Average), torch.ones(1))
    for op in (hvd.Adasum, hvd.Average):
        with pytest.raises(ValueError, match="expected one that is registered"):
            hvd.allreduce(torch.ones(3), op=op, process_set=hvd.ProcessSet([0]))


def case_process_set_of_some_ranks_of_each_host() -> None:
    """On two hosts of two ranks: ranks 0 and 1 of one, and rank 1 of the other."""
    if hvd.size() < 4:
        pytest.skip("needs 4 ranks")
    some = process_sets.of(0, 1, 3)
    if some.included():
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=some)
        assert torch.equal(total, torch.full((3,), 3.0))


@pytest.mark.parametrize("dtype_name", ["int32", "int64"])
def case_wrong_dtype_is_refused_on_all_ranks(dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    with pytest.raises(ValueError, match=r"wrong\.dtype.*expected dtype float16"):
        hvd.allreduce(torch.ones(5, dtype=dtype), op=hvd.Adasum, name="wrong.dtype")
    good = hvd.allreduce(torch.ones(5), op=hvd.Adasum, name="right.dtype")
    assert torch.equal(good, torch.ones(5))


def case_mismatches_are_refused_on_all_ranks() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    with pytest.raises(
        hvd.HorovodInternalError, match="Mismatched ADASUM tensor shapes"
    ):
        hvd.allreduce(torch.ones(5 + hvd.rank()), op=hvd.Adasum, name="mismatch.shape")
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
        dtype = torch.float32 if hvd.rank() else torch.float64
        hvd.allreduce(torch.ones(5, dtype=dtype), op=hvd.Adasum, name="mismatch.dtype")
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched prescale"):
        hvd.allreduce(
            torch.ones(5),
            op=hvd.Adasum,
            name="mismatch.scale",
            prescale_factor=1.0 + hvd.rank(),
        )
    assert torch.equal(
        hvd.allreduce(torch.ones(3), op="adasum", name="after"), torch.ones(3)
    )


def case_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="reduction op: expected one of average"):
        hvd.allreduce(torch.ones(3), op="adasome")
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        hvd.allreduce(torch.ones(3), average=True, op=hvd.Adasum)


def case_gradients() -> None:
    weight = tensor_of(0, 300, torch.float64, 9).requires_grad_()
    mine = tensor_of(hvd.rank(), 300, torch.float64, 10)
    hvd.allreduce(weight * 1.0, op=hvd.Adasum, name="autograd").backward(mine)
    expected = reference.adasum(
        [tensor_of(r, 300, torch.float64, 10).numpy() for r in range(hvd.size())],
        HOSTS,
        os.environ.get("ADASUM_HVD_GROUP_OP", "adasum"),
        int(os.environ.get("ADASUM_HVD_GROUP_SIZE", "0")),
    )
    np.testing.assert_allclose(weight.grad.numpy(), expected, rtol=1e-9, atol=1e-12)
    first, second = torch.ones(3, requires_grad=True), torch.ones(4, requires_grad=True)
    a, b = hvd.grouped_allreduce([first, second], op=hvd.Adasum, name="autograd.group")
    (a.sum() + 2 * b.sum()).backward()
    assert torch.equal(first.grad, torch.ones(3))
    assert torch.equal(second.grad, 2 * torch.ones(4))


def case_other_ops_still_work() -> None:
    mine = torch.full((4,), float(hvd.rank() + 1))
    total = sum(range(1, hvd.size() + 1))
    assert torch.equal(
        hvd.allreduce(mine, op="sum", name="sum"), torch.full((4,), float(total))
    )
    mean = hvd.allreduce(mine, op=hvd.Average, name="mean")
    np.testing.assert_allclose(mean, np.full(4, total / hvd.size()), rtol=1.3e-6)
    assert torch.equal(
        hvd.allreduce(mine, op=hvd.Max, name="max"), torch.full((4,), float(hvd.size()))
    )
    group = hvd.grouped_allreduce([mine, mine], op="min", name="min")
    assert all(torch.equal(t, torch.ones(4)) for t in group)


def case_layouts() -> None:
    conformance.layouts(engine())


def case_delta_is_an_op_of_its_own() -> None:
    before = hvd.counters()
    mine = tensor_of(hvd.rank(), 500, torch.float32, 12)
    delta = hvd.allreduce(mine, op=hvd.AdasumDelta, name="weight")
    plain = hvd.allreduce(mine, op=hvd.AdasumGrad, name="weight")
    assert torch.equal(delta, plain)
    after = hvd.counters()
    assert after.delta_tensors == before.delta_tensors + 1
    assert after.calls == before.calls + 2
    phases = [name for name in after._fields if name.endswith("_nanoseconds")]
    assert len(phases) == 3
    for phase in phases:
        spent = getattr(after, phase) - getattr(before, phase)
        assert (0 < spent < 60e9) == (hvd.size() > 1), phase
    if hvd.size() > 1:
        # One rank reduces the delta and the others the gradient: two names, never one result.
        name = hvd.AdasumDelta if hvd.rank() == 0 else hvd.AdasumGrad
        handle = hvd.allreduce_async(mine, op=name, name="either")
        other = hvd.AdasumGrad if hvd.rank() == 0 else hvd.AdasumDelta
        second = hvd.allreduce_async(mine, op=other, name="either")
        assert torch.equal(hvd.synchronize(handle), hvd.synchronize(second))


def case_unmodified_horovod_scripts_reach_the_op() -> None:
    import horovod.torch as unmodified

    before = hvd.counters().calls
    mine = tensor_of(hvd.rank(), 64, torch.float32, 13)
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises(NotImplementedError, match="non-power of 2"):
            unmodified.allreduce(mine, op=unmodified.Adasum, name="unmodified")
        return
    result = unmodified.allreduce(mine, op=unmodified.Adasum, name="unmodified")
    check_close(
        result, reference_of(64, torch.float32, range(hvd.size()), 13), torch.float32
    )
    assert hvd.counters().calls == before + 1


def case_path() -> str:
    """How the ranks reach each other."""
    return binding.transport_description(LIBRARY)


def case_groups_of_an_earlier_init() -> None:
    """They were for that one."""
    if hvd.size() > 1:  # a rank may find the addresses of the first start
        pytest.skip("Horovod starts again only if a rank is alone")
    hvd.shutdown()
    hvd.init(group_op="average", group_size=2)
    assert hvd.settings()["group_op"] == "average"
    hvd.shutdown()
    hvd.init()
    assert (hvd.settings()["group_op"], hvd.settings()["group_size"]) == ("adasum", 0)
    total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="started.again")
    assert np.array_equal(total.numpy(), np.full(2, float(hvd.size())))


def case_init_while_horovod_runs() -> None:
    before = hvd.settings()
    if hvd.rank() == 0:  # it has no effect, so it is not collective
        hvd.init()
        hvd.init(group_op=str(before["group_op"]))
    other = "sum" if before["group_op"] == "average" else "average"
    for groups in ({"group_op": other}, {"group_size": 77}):
        with pytest.raises(
            RuntimeError, match=r"the groups of the running Horovod.*shutdown"
        ):
            hvd.init(**groups)
    os.environ["ADASUM_HVD_GROUP_SIZE"], found = "55", hvd.settings()
    del os.environ["ADASUM_HVD_GROUP_SIZE"]
    if before["group_size"]:
        os.environ["ADASUM_HVD_GROUP_SIZE"] = str(before["group_size"])
    assert found == before
    total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="init.again")
    assert np.array_equal(total.numpy(), np.full(2, float(hvd.size())))


def case_init_again_and_recycled_process_sets() -> None:
    mine = tensor_of(hvd.rank(), 5000, torch.float32, 30)
    first = hvd.allreduce(mine, op=hvd.Adasum, name="again")
    # Horovod cannot start again with several ranks: it finalizes MPI, and with Gloo a rank may
    # find the addresses of the first start in the rendezvous store.
    for _ in range(2 if hvd.size() == 1 else 0):
        hvd.shutdown()
        hvd.init()
        assert torch.equal(hvd.allreduce(mine, op=hvd.Adasum, name="again"), first)
    if hvd.size() > 2:
        for ranks in ([0, 1], [1, 2]):  # the second one gets the first one's id
            added = hvd.add_process_set(ranks)
            if added.included():
                pair = [tensor_of(r, 5000, torch.float32, 30).numpy() for r in ranks]
                result = hvd.allreduce(
                    mine, op=hvd.Adasum, name="recycled", process_set=added
                )
                expected = reference.adasum(pair, [HOSTS[r] for r in ranks])
                if "ADASUM_HVD_GROUP_OP" not in os.environ:
                    check_close(result, expected, torch.float32)
            hvd.remove_process_set(added)
