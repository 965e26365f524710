"""The engine on torch.distributed with ranks as threads, against the reference.

Several ranks share a device, each with a stream of its own; where there is none, the CPU stands in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from adasum_hvd import reference
from adasum_hvd.adam_offload import AdamOffload
from adasum_hvd.distributed import (
    AdasumState,
    Compression,
    LocalSGD,
    adasum_all_reduce,
    adasum_hook,
)
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.exchange import Shards
from adasum_hvd.distributed.reduction import reduce_buffer, reduce_tensors
from adasum_hvd.distributed.rules import Rule, rule_of
from adasum_hvd.monitor.statistics import TensorRecord, statistics, width
from tests.parallel.harness import conformance, expected_records, threads
from tests.parallel.harness.conformance import CHECKS, Engine, tensor_of

RANKS = [3, 2, 4, 8]  # make test has the first (tests/tiers.py)
seeding = threading.Lock()  # of torch's one generator
SHAPES = [(3, 5), (), (4097,), (0,), (70, 130), (1,)]
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # of the largest element


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(before)


def engine_of(rank: int, ranks: int, device: str) -> Engine:
    def several(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        own = [tensor.to(device) for tensor in tensors]
        adasum_all_reduce(own)
        return [tensor.cpu() for tensor in own]

    def in_place(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor.copy_(*several([tensor], name))

    return Engine(
        rank, [0] * ranks, lambda t, name: in_place(t.clone(), name), in_place, several,
        Communicator().all_gather_object,
    )  # fmt: skip


@pytest.mark.parametrize("thread_ranks", RANKS)
@pytest.mark.parametrize("check", ["every_dtype_and_size", *CHECKS])
def test_conformance(device: str, thread_ranks: int, check: str) -> None:
    def rank_main(rank: int) -> object:
        return getattr(conformance, check)(engine_of(rank, thread_ranks, device))

    found = threads.run(thread_ranks, device, rank_main)
    assert all(one == found[0] for one in found)


def gradients_of(rank: int, device: str = "cpu") -> list[torch.nn.Parameter]:
    parameters = []
    for number, shape in enumerate(SHAPES):
        values = tensor_of(rank, int(np.prod(shape)), torch.float32, number)
        parameter = torch.nn.Parameter(torch.zeros(shape, device=device))
        parameter.grad = values.view(shape).to(device)
        parameters.append(parameter)
    return parameters


def check_gradients(found: list[list[torch.Tensor]], dtype: torch.dtype) -> None:
    """Compare the ranks' reduced gradients with each other, and with the reference."""
    for number in range(len(SHAPES)):
        inputs = [
            gradients_of(rank)[number].grad.to(dtype).double().numpy().reshape(-1)
            for rank in range(len(found))
        ]
        expected = reference.adasum(inputs)
        for own in found:
            assert torch.equal(own[number], found[0][number])
        error = np.abs(found[0][number].double().numpy() - expected)
        if error.size:
            assert error.max() <= CLOSE[dtype] * np.abs(expected).max()


@pytest.mark.parametrize("compression", [Compression.none, Compression.bf16])
@pytest.mark.parametrize("thread_ranks", RANKS)
def test_hook(device: str, thread_ranks: int, compression: torch.dtype | None) -> None:
    """Two buckets in flight, twice; the first round is repeated bit by bit in other buckets."""

    def rank_main(rank: int) -> list[list[torch.Tensor]]:
        state, rounds = AdasumState(compression=compression), []
        for cut in (2, 4):
            parameters = gradients_of(rank, device)
            halves = parameters[:cut], parameters[cut:]
            buckets = [threads.Bucket.of(p, k, k == 1) for k, p in enumerate(halves)]
            futures = [adasum_hook(state, bucket) for bucket in buckets]
            flat = torch.cat([future.wait() for future in futures]).cpu()
            rounds.append(list(flat.split([p.numel() for p in parameters])))
        return rounds

    found = threads.run(thread_ranks, device, rank_main)
    for first, second in found:
        assert all(map(torch.equal, first, second))
    dtype = compression or torch.float32
    check_gradients([first for first, _ in found], dtype)


@pytest.mark.filterwarnings("ignore:.*one group")
@pytest.mark.parametrize("thread_ranks", RANKS)
def test_rules(device: str, thread_ranks: int) -> None:
    sizes = (1, 4097, 20_000)

    def rank_main(rank: int) -> list[torch.Tensor]:
        found = []
        for words in (
            {"rule": "mean"},
            {"rule": lambda gram: torch.ones_like(gram[:, 0])},
            {"group_op": "average", "group_size": 2},
            {"group_op": "sum", "group_size": 2},
        ):
            own = [tensor_of(rank, size, torch.float64).to(device) for size in sizes]
            adasum_all_reduce(own, **words)
            found.append(torch.cat(own).cpu())
        return found

    found = threads.run(thread_ranks, device, rank_main)
    inputs = [
        [tensor_of(r, size, torch.float64).numpy() for r in range(thread_ranks)]
        for size in sizes
    ]
    expected = [
        np.concatenate([np.mean(vectors, 0) for vectors in inputs]),
        np.concatenate([np.sum(vectors, 0) for vectors in inputs]),
        *(
            np.concatenate([reference.adasum(v, [0] * thread_ranks, op, 2) for v in inputs])
            for op in ("average", "sum")
        ),
    ]  # fmt: skip
    for own in found:
        for mine, others, correct in zip(own, found[0], expected, strict=True):
            assert torch.equal(mine, others)
            assert np.abs(mine.numpy() - correct).max() <= 1e-9 * np.abs(correct).max()


@pytest.mark.parametrize("shards", [2, 4])
def test_shards(device: str, shards: int) -> None:
    """Two replicas of ragged shards, one of them empty, with pairs that nearly cancel."""
    sizes = (10_000, 3)  # of which the last shard has no element of the second tensor

    def whole(replica: int) -> list[torch.Tensor]:
        base = [tensor_of(0, size, torch.float32) for size in sizes]
        noise = [tensor_of(replica, size, torch.float32, 1) for size in sizes]
        return [
            (1 - 2 * replica) * b + 1e-3 * n for b, n in zip(base, noise, strict=True)
        ]

    def rank_main(rank: int) -> list[torch.Tensor]:
        replica, shard = divmod(rank, shards)
        across = [dist.new_group([k, shards + k]) for k in range(shards)][shard]
        within = [
            dist.new_group(list(range(k * shards, (k + 1) * shards))) for k in range(2)
        ][replica]
        own = [t.tensor_split(shards)[shard].to(device) for t in whole(replica)]
        parts = Shards(Communicator(within, apart=True), (0, 1))
        reduce_tensors(
            own,
            Communicator(across, apart=True),
            rule_of("adasum", None, None),
            [parts],
        )
        return [tensor.cpu() for tensor in own]

    found = threads.run(2 * shards, device, rank_main)
    for number in range(len(sizes)):
        expected = reference.adasum([whole(k)[number].numpy() for k in range(2)])
        for replica in (found[:shards], found[shards:]):
            result = torch.cat([own[number] for own in replica]).double().numpy()
            assert np.abs(result - expected).max() <= 1e-6 * np.abs(expected).max()


def on_hosts(hosts: tuple[int, ...], group: object = None) -> Communicator:
    communicator = Communicator(group)
    communicator.hosts = hosts
    return communicator


FOUR_PAIRS = (0, 0, 1, 1, 2, 2, 3, 3)


@pytest.mark.parametrize("group_op", ["adasum", "average"])
@pytest.mark.parametrize(
    ("hosts", "group_size", "order", "radices"),
    [
        ((0, 1, 1, 0), 0, (0, 3, 1, 2), (2, 2)),
        ((0, 0, 0, 1, 1, 1), 0, range(6), (3, 2)),
        (FOUR_PAIRS, 0, range(8), (2, 4)),
        ((0,) * 4 + (1,) * 4, 2, range(8), (2, 2, 2)),
        ((0, 0, 1, 1, 1), 0, None, None),  # uneven hosts
    ],
    ids=str,
)
def test_levels(device, hosts, group_size, order, radices, group_op) -> None:
    """Results are rounded once in each level, in any buffer."""
    rule = Rule("adasum", group_op, group_size)
    sizes = (1, 0, 7, 4097, 300, 30_003, 8)
    for dtype in conformance.TOLERANCE:

        def rank_main(rank: int, dtype=dtype) -> list[torch.Tensor]:
            own = [tensor_of(rank, size, dtype).to(device) for size in sizes]
            alone = [tensor.clone() for tensor in own]
            for tensors in (own, *([tensor] for tensor in alone)):
                reduce_tensors(tensors, on_hosts(hosts), rule)
            assert all(map(torch.equal, own, alone))
            return [tensor.cpu() for tensor in own]

        found = threads.run(len(hosts), device, rank_main)
        for own in found:
            assert all(map(torch.equal, own, found[0]))
        inputs = [
            torch.cat([tensor_of(r, size, dtype) for size in sizes])
            for r in range(len(hosts))
        ]
        for number, several in enumerate(
            zip(*(t.split(sizes) for t in inputs), strict=True)
        ):
            if radices:
                expected = conformance.by_levels(
                    [several[r] for r in order], radices, group_op
                )
            else:
                wide = [tensor.double().numpy() for tensor in several]
                once = reference.adasum(wide, hosts, group_op, group_size)
                expected = torch.from_numpy(once).to(dtype)
            check_rounded(found[0][number], expected)


def check_rounded(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that they are equal, but for errors of float64, which may round the other way."""
    if found.dtype == torch.float64:
        largest = expected.abs().max() if len(expected) else 0.0
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * largest)
    else:
        torch.testing.assert_close(found, expected)
        assert (found != expected).sum() <= 1 + len(found) // 1000


@pytest.mark.parametrize("scale", [1.0, 1e300, 1e-300])
def test_hosts_that_nearly_cancel(device: str, scale: float) -> None:
    """In tensors that lie on slices of several ranks of both levels, and in others."""
    sizes = (60_000, 0, 100, 9000)

    def vectors(rank: int) -> list[torch.Tensor]:
        host = FOUR_PAIRS[rank]
        base = [tensor_of(host // 2, size, torch.float64, 5, scale) for size in sizes]
        noise = [
            tensor_of(host, size, torch.float64, 6, 1e-4 * scale) for size in sizes
        ]
        cancels = [True, True, host < 2, False]
        return [
            -b + n if host % 2 and c else b + n
            for b, n, c in zip(base, noise, cancels, strict=True)
        ]

    def rank_main(rank: int) -> list[torch.Tensor]:
        own = [tensor.to(device) for tensor in vectors(rank)]
        reduce_tensors(own, on_hosts(FOUR_PAIRS), Rule("adasum"))
        return [tensor.cpu() for tensor in own]

    found = threads.run(8, device, rank_main)
    for own in found:
        assert all(map(torch.equal, own, found[0]))
    inputs = [vectors(rank) for rank in range(8)]
    for number, size in enumerate(sizes):
        expected = reference.adasum([own[number].numpy() for own in inputs], FOUR_PAIRS)
        error = np.abs(found[0][number].numpy() - expected)
        assert not size or error.max() <= 1e-9 * np.abs(expected).max()


@pytest.mark.parametrize("cancelling", [(0, 1, 2), (1,)])
def test_levels_of_shards(device: str, cancelling: tuple[int, ...]) -> None:
    """Two shards of six replicas, and a tensor that each shard has for itself.

    Some tensors nearly cancel between hosts, and one has no element in the second shard.
    """
    sizes, hosts, shards = (30_001, 1, 9000), (0, 0, 1, 1, 2, 2), 2
    ranks = range(shards * len(hosts))

    def whole(replica: int) -> list[torch.Tensor]:
        base = [tensor_of(0, size, torch.float32) for size in sizes]
        noise = [tensor_of(replica, size, torch.float32, 1, 1e-4) for size in sizes]
        for number in cancelling if hosts[replica] == 1 else ():
            base[number].neg_()
        return [b + n for b, n in zip(base, noise, strict=True)]

    def alone(replica: int, shard: int) -> torch.Tensor:
        return tensor_of(replica, 5000, torch.float32, 10 + shard)

    def rank_main(rank: int) -> list[torch.Tensor]:
        replica, shard = divmod(rank, shards)
        across = [dist.new_group([*ranks[k::shards]]) for k in range(shards)][shard]
        within = [dist.new_group([*ranks[k : k + shards]]) for k in ranks[::shards]]
        own = [t.tensor_split(shards)[shard].to(device) for t in whole(replica)]
        own.insert(1, alone(replica, shard).to(device))
        parts = Shards(Communicator(within[replica], apart=True), (0, 2, 3))
        reduce_tensors(own, on_hosts(hosts, across), Rule("adasum"), [parts])
        return [tensor.cpu() for tensor in own]

    found = threads.run(len(ranks), device, rank_main)
    for shard in range(shards):
        for own in found[shard::shards]:
            assert all(map(torch.equal, own, found[shard]))
        inputs = [alone(replica, shard) for replica in range(len(hosts))]
        check_rounded(found[shard].pop(1), conformance.by_levels(inputs, (2, 3)))
    for number in range(len(sizes)):
        result = torch.cat([own[number] for own in found[:shards]])
        inputs = [whole(replica)[number] for replica in range(len(hosts))]
        check_rounded(result, conformance.by_levels(inputs, (2, 3)))


@pytest.mark.parametrize(
    ("group_op", "group_size", "hosts", "levels"),
    [
        ("adasum", 0, (0, 0, 1, 1, 2, 2), (2, 3)),
        ("average", 0, (0, 0, 1, 1, 2, 2), (3,)),
        ("adasum", 2, (0, 0, 0, 0, 1, 1, 1, 1), (2, 2, 2)),
    ],
)
def test_records_of_levels(
    device, group_op, group_size, hosts, levels, monkeypatch
) -> None:
    """They have the form of the core's, and the figures of each level."""
    monkeypatch.setenv("ADASUM_HVD_GROUP_OP", group_op)
    monkeypatch.setenv("ADASUM_HVD_GROUP_SIZE", str(group_size))
    sizes, rule = (30_001, 0, 50, 9000), Rule("adasum", group_op, group_size)
    ranks = range(len(hosts))
    inputs = [[tensor_of(r, size, torch.float64) for size in sizes] for r in ranks]

    def rank_main(rank: int) -> TensorRecord:
        flat = torch.cat(inputs[rank]).to(device)
        return reduce_buffer(flat, sizes, on_hosts(hosts), rule, observe=True)

    records = threads.run(len(ranks), device, rank_main)
    assert {record.sizes for record in records} == {levels}
    rows = sum(record.rows for record in records).reshape(len(sizes), width(levels))
    found = statistics(rows, levels)
    for number in (0, 2, 3):
        vectors = [own[number].numpy() for own in inputs]
        expected = expected_records.expected_statistics(vectors, hosts, levels)
        for name, value in expected.items():
            assert found[name][number] == pytest.approx(value, 1e-9), name


@pytest.mark.parametrize("thread_ranks", RANKS)
def test_local_sgd(device: str, thread_ranks: int) -> None:
    """Three local steps with gradients of each rank's own, then AdaSum of the changes."""

    def train(rank: int, reduced: bool) -> list[torch.Tensor]:
        with seeding:
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 7))
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if reduced:
            LocalSGD(optimizer, model, dist.group.WORLD, 3)
        starts = [p.detach().clone() for p in model.parameters()]
        for number in range(3):
            for place, parameter in enumerate(model.parameters()):
                gradient = tensor_of(
                    rank, parameter.numel(), torch.float32, 10 * number + place
                )
                parameter.grad = gradient.view_as(parameter).to(device)
            optimizer.step()
        pairs = zip(model.parameters(), starts, strict=True)
        return [(p.detach() - start).cpu() for p, start in pairs]

    alone = threads.run(thread_ranks, device, lambda rank: train(rank, False))
    together = threads.run(thread_ranks, device, lambda rank: train(rank, True))
    for number, change in enumerate(together[0]):
        changes = [own[number].double().numpy().reshape(-1) for own in alone]
        expected = reference.adasum(changes)
        assert all(torch.equal(own[number], change) for own in together)
        error = np.abs(change.double().numpy().reshape(-1) - expected).max()
        assert error <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("thread_ranks", RANKS)
def test_adam_offload(device: str, thread_ranks: int) -> None:
    """Steps with gradients that a hook has replaced since they were on their way to the host."""
    scales = (1.0, -0.5, 4.0)  # AdaSum of scaled gradients has scaled bits

    def rank_main(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parameters, reduced = gradients_of(rank, device), []
        own = [p.grad for p in parameters]
        optimizer = AdamOffload(parameters, 0.01, torch_eps=True, verbose=False)
        for scale in scales:
            optimizer.zero_grad()
            pairs = zip(parameters, own, strict=True)
            sum((p * gradient).sum() * scale for p, gradient in pairs).backward()
            bucket = threads.Bucket.of(parameters, 0, True)
            flat = adasum_hook(AdasumState(), bucket).wait()
            parts = flat.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))
            reduced.append(flat.cpu())
            optimizer.step()
        return reduced, [p.detach().cpu() for p in parameters]

    found = threads.run(thread_ranks, device, rank_main)
    first = found[0][0][0]
    for reduced, _ in found:
        for flat, scale in zip(reduced, scales, strict=True):
            assert torch.equal(flat, first * scale)
    parts = first.split([int(np.prod(shape)) for shape in SHAPES])
    check_gradients([list(parts)] * thread_ranks, torch.float32)
    expected = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = torch.optim.Adam(expected, 0.01)
    for scale in scales:
        for parameter, part in zip(expected, parts, strict=True):
            parameter.grad = part.view_as(parameter) * scale
        optimizer.step()
    for _, parameters in found:
        for parameter, correct in zip(parameters, expected, strict=True):
            torch.testing.assert_close(
                parameter, correct.detach(), rtol=1e-5, atol=1e-8
            )


def test_received_rows_are_aligned(device: str) -> None:
    """Whatever the slices' lengths are; a device loads 16 bytes at a time then."""

    def rank_main(rank: int) -> None:
        flat = tensor_of(rank, 10, torch.float16).to(device)
        rows = Communicator().scatter(flat, (0, 3, 6, 10))
        bounds = [(0, 3), (3, 6), (6, 10)][rank]
        for peer, row in enumerate(rows):
            expected = tensor_of(peer, 10, torch.float16)[slice(*bounds)]
            assert torch.equal(row.cpu(), expected)
            assert peer == rank or row.data_ptr() % 16 == 0

    threads.run(3, device, rank_main)


def test_an_error_of_one_rank_ends_the_others(device: str) -> None:
    def rank_main(rank: int) -> None:
        adasum_all_reduce(torch.ones(3, device=device))
        if rank == 1:
            raise KeyError("of rank 1")
        adasum_all_reduce(torch.ones(3, device=device))

    with pytest.raises(KeyError, match="of rank 1"):
        threads.run(3, device, rank_main)
