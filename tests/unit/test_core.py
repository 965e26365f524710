"""The core by its C interface: processes that need neither a framework nor Horovod."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import mmap
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adasum_hvd import core, reference
from adasum_hvd.horovod.build.sources import CORE

# Forks of a process that has imported this file, and has no other thread.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])
SIZES = ((5,), (1, 0, 7, 4096, 3), (4097, 300_001, 17))
JOB_RANKS = 100  # of rank 0: messages name ranks of the job
# Of the results with so many ranks, on x86-64 and on arm64: every processor has the same.
BITS = {
    1: "02955d2c6b5a4e18",
    2: "95ccf5760f9dae41",
    3: "a1d596b69f014b73",
    5: "a13195c27ed09c9c",
}
EPS = {"float16": 2**-11, "float32": 2**-24, "float64": 2**-53}


class Rank:
    """A rank's numbers, its gather over the parent process, and its groups."""

    def __init__(self, connection: Connection, rank: int, size: int):
        self._connection, self.rank, self.size = connection, rank, size

    def gather(self, thing: Any) -> list[Any]:
        self._connection.send(thing)
        return self._connection.recv()

    def group(
        self,
        timeout_seconds: float = 60,
        hosts: list[int] | None = None,
        places: list[int] | None = None,
        network: core.Network | None = None,
    ) -> core.Group:
        ranks = range(JOB_RANKS, JOB_RANKS + self.size)
        group = core.Group(
            self.rank,
            hosts or [0] * self.size,
            places or [0] * self.size,
            ranks,
            "adasum",
            0,
            timeout_seconds,
            "of the test",
            network,
        )
        names, nonces = zip(*self.gather((group.name, group.nonce)), strict=True)
        group.connect(names, nonces)
        self.gather(True)
        return group


def _main(
    connection: Connection, body: Callable, rank: int, size: int, words: tuple
) -> None:
    result = body(Rank(connection, rank, size), *words)
    connection.send(("result", result))


def run(body: Callable, size: int, *words: Any) -> list[Any]:
    """Run `body(rank, *words)` on so many processes; return results, None of one that died."""
    pairs = [SERVER.Pipe() for _ in range(size)]
    processes = [
        SERVER.Process(target=_main, args=(remote, body, rank, size, words))
        for rank, (_, remote) in enumerate(pairs)
    ]
    for process, (_, remote) in zip(processes, pairs, strict=True):
        process.start()
        remote.close()
    results: list[Any] = [None] * size
    alive = set(range(size))
    while alive:
        sent = {}
        for rank in sorted(alive):
            with contextlib.suppress(EOFError):
                assert pairs[rank][0].poll(60), f"rank {rank} sent nothing for 60 s"
                sent[rank] = pairs[rank][0].recv()
        ended = {
            r: s[1]
            for r, s in sent.items()
            if isinstance(s, tuple) and s[0] == "result"
        }
        for rank, result in ended.items():
            results[rank] = result
        alive = sent.keys() - ended.keys()
        for rank in alive:
            pairs[rank][0].send([sent.get(other) for other in range(size)])
    for process in processes:
        process.join(10)
        assert process.exitcode is not None
    return results


def table(
    array: np.ndarray, sizes: tuple[int, ...], at: int | None = None
) -> np.ndarray:
    """Return the table of tensors that lie end to end in an array."""
    rows = np.zeros(len(sizes), core.TENSOR)
    rows["elements"] = sizes
    ends = np.cumsum(sizes) * array.itemsize
    rows["input"] = (array.ctypes.data if at is None else at) + np.concatenate(
        [[0], ends[:-1]]
    )
    rows["output"] = rows["input"]
    return rows


def inputs(rank: int, sizes: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(sum(sizes)).astype(dtype)


def reduce_all(rank: Rank) -> list[tuple[str, float]]:
    """Return digests, and the largest errors in units of the dtype's rounding."""
    group, found = rank.group(), []
    for dtype in EPS:
        for sizes in SIZES:
            mine = inputs(rank.rank, sizes, dtype)
            group.reduce(table(mine, sizes), dtype)
            everyone = [inputs(other, sizes, dtype) for other in range(rank.size)]
            bounds = np.cumsum(sizes)[:-1]
            parts = [np.split(one, bounds) for one in everyone]
            error = 0.0
            for k, got in enumerate(np.split(mine, bounds)):
                if got.size:
                    want = reference.adasum([of[k].astype("float64") for of in parts])
                    scale = sum(np.abs(of[k].astype("float64")) for of in parts).max()
                    error = max(
                        error, float(np.abs(got - want).max() / scale / EPS[dtype])
                    )
            found.append((hashlib.sha256(mine.tobytes()).hexdigest(), error))
    return found


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_results_are_the_references_and_the_same_on_all_ranks(size: int) -> None:
    first, *others = run(reduce_all, size)
    assert len(first) == len(EPS) * len(SIZES)
    for other in others:
        assert other == first
    assert max(error for _, error in first) <= 8
    bits = hashlib.sha256("".join(digest for digest, _ in first).encode())
    assert bits.hexdigest()[:16] == BITS[size]


class Some:
    """Some ranks of a job, which gather among themselves."""

    def __init__(self, rank: Rank, members: list[int]):
        self._rank, self._members = rank, members
        self.rank, self.size = members.index(rank.rank), len(members)

    def gather(self, thing: Any) -> list[Any]:
        everyone = self._rank.gather(thing)
        return [everyone[member] for member in self._members]


# By shard, elements of the tensors that it holds, the first of which cancels to a part in 10^6:
# the second shard has none of the second and fourth, and all tensors of the third are in it.
SHARDS = ((3000, 5, 70_000, 1), (41_000, 0, 70_001, 0))
VECTORS = (1.0, -1.001, 3.0)


def sharded(rank: Rank, dtype: str) -> list[np.ndarray]:
    """Reduce shards over 3 replicas; return this rank's tensors before and after, by tensor."""
    replica, shard = divmod(rank.rank, 2)
    replicas = Rank.group(Some(rank, [shard, shard + 2, shard + 4]))
    shards = Rank.group(Some(rank, [2 * replica, 2 * replica + 1]))
    sizes = SHARDS[shard]
    mine = inputs(rank.rank, sizes, dtype)
    mine[: sizes[0]] = inputs(shard, sizes[:1], dtype) * VECTORS[replica]
    before = mine.copy()
    for _ in range(2):
        mine[:] = before
        replicas.reduce(table(mine, sizes), dtype, shards=[(shards, range(4))])
    bounds = np.cumsum(sizes)[:-1]
    return [np.split(before, bounds), np.split(mine, bounds)]


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_shards_are_reduced_as_the_whole_tensor(dtype: str) -> None:
    results = run(sharded, 6, dtype)
    for tensor in range(4):
        before, after = (
            [
                np.concatenate([results[2 * r + s][which][tensor] for s in range(2)])
                for r in range(3)
            ]
            for which in range(2)
        )
        assert all((one == after[0]).all() for one in after)
        wide = [one.astype("float64") for one in before]
        error = np.abs(after[0] - reference.adasum(wide)).max()
        largest = sum(np.abs(one) for one in wide).max()
        # What is left of vectors that cancel has fewer digits.
        digits = 2e3 if tensor == 0 else 1
        assert error <= 8 * digits * EPS[dtype] * largest


def ruled(rank: Rank, dtype: str) -> list[Any]:
    """Weigh ranks by their norms, with a rule that fails at first, on the second rank alone."""
    group, sizes = rank.group(), (5, 0, 70_000)
    mine, seen = inputs(rank.rank, sizes, dtype) * 1e30, []

    def by_norm(grams: np.ndarray) -> np.ndarray:
        assert len(seen) or rank.rank != 1, "the rule's own error"
        seen.append(grams.copy())
        norms = grams[:, np.cumsum([0, *range(rank.size, 1, -1)])]
        return norms / np.maximum(norms.sum(1, keepdims=True), 1e-300)

    before, errors = mine.copy(), []
    for _ in range(2):
        try:
            group.reduce(table(mine, sizes), dtype, rule=by_norm)
        except (AssertionError, core.CoreError) as error:
            errors.append(str(error))
            assert (mine == before).all()
            seen.append(None)
    return [errors, seen[-1], mine]


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_a_rule_has_the_gram_matrices_on_all_ranks(dtype: str) -> None:
    results = run(ruled, 3, dtype)
    for number, (errors, grams, after) in enumerate(results):
        (error,) = errors
        own = "the rule's own error"
        assert error.startswith(own) if number == 1 else "failed on another" in error
        assert (grams == results[0][1]).all() and not grams[1].any()
        assert (after == results[0][2]).all()
    several = [
        inputs(rank, (70_005,), dtype).astype("float64") * 1e30 for rank in range(3)
    ]
    for part in (slice(0, 5), slice(5, None)):
        squares = np.array([one[part] @ one[part] for one in several])
        want = (squares / squares.sum()) @ [one[part] for one in several]
        error = np.abs(results[0][2][part] - want).max()
        assert error <= 8 * EPS[dtype] * np.abs([one[part] for one in several]).max()


def outlive(rank: Rank, child: bool) -> tuple[float, str] | None:
    """Return how long this rank waited for one that is killed, and the error."""
    group = rank.group()
    ones = np.ones(1000, "float32")
    group.reduce(table(ones, (1000,)), "float32")
    if rank.rank == 1:
        if child and os.fork() == 0:
            rank._connection.close()  # else the test waits for it, too
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(core.Unresponsive) as error:
        group.reduce(table(ones, (1000,)), "float32")
    with pytest.raises(core.Unresponsive, match=re.escape(str(error.value))):
        group.gather(ones.ctypes.data, np.zeros((3, 1000)).ctypes.data, ones.nbytes)
    return time.monotonic() - began, str(error.value)


@pytest.mark.parametrize("child", (False, True))
def test_a_killed_rank_is_named_at_once(child: bool) -> None:
    results = run(outlive, 3, child)
    assert results[1] is None
    for waited, message in (results[0], results[2]):
        assert f"rank {JOB_RANKS + 1} ended" in message
        assert waited < 2


def late(rank: Rank, delay: float, limit: float) -> tuple[float, int, list[str]]:
    """Return processor time and sleeps of two reductions whose second rank is late, and errors."""
    group = rank.group(limit)
    ones = np.ones(1000, "float32")
    began, errors = time.process_time(), []
    slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    if rank.rank == 1:
        time.sleep(delay)
    for _ in range(2):
        try:
            group.reduce(table(ones, (1000,)), "float32")
        except core.Unresponsive as error:
            errors.append(str(error))
    slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - slept
    return time.process_time() - began, slept, errors


def test_a_late_rank_is_awaited_asleep() -> None:
    (spent, slept, errors), (_, _, others) = run(late, 2, 3.0, 60.0)
    assert errors == others == []
    assert spent < 1
    assert slept < 600  # 50 ms each


def test_a_rank_that_is_too_late_is_an_error_that_names_the_limit() -> None:
    (*_, errors), (*_, others) = run(late, 2, 4.0, 2.0)
    assert len(errors) == 2
    assert all(
        f"rank {JOB_RANKS + 1} did not respond for 2 s, the limit of the test" in error
        for error in errors
    )
    assert others  # in the second reduction at the latest


def forked(rank: Rank) -> tuple[int, str]:
    network = NoRoute()  # whose connections are the parent's, too
    group = rank.group(network=network)
    ones = np.ones(3, "float32")
    pid = os.fork()
    if pid == 0:
        try:
            group.reduce(table(ones, (3,)), "float32")
        except core.CoreError as error:
            del group
            refused = "forked child" in str(error) and not network.aborted
            os._exit(7 if refused else 8)
        os._exit(9)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    group.reduce(table(ones, (3,)), "float32")
    return status, str(ones.tolist())


def test_a_forked_child_is_refused_and_its_parent_goes_on() -> None:
    assert run(forked, 2) == [(7, "[1.0, 1.0, 1.0]")] * 2


def moved(rank: Rank) -> tuple[bool, list[float]]:
    """Reduce in memory that was moved; return whether it stayed where it is."""
    sizes = (70_000, 5)
    mapping = mmap.mmap(-1, 400_000)
    flat = np.frombuffer(mapping, "float32")[: sum(sizes)]
    flat[:] = inputs(rank.rank, sizes, "float32")
    before = flat.copy()
    other = core.share(flat.ctypes.data, 400_000)
    same = bool((flat == before).all())
    rank.group().reduce(table(flat, sizes, other), "float32")
    plain = before.copy()
    rank.group().reduce(table(plain, sizes), "float32")
    equal = bool((plain == flat).all())
    del flat
    mapping.close()
    start = f"{other:x}-"  # of a line of the process's mappings
    mapped = start in Path("/proc/self/maps").read_text()
    core.free(other)
    freed = start not in Path("/proc/self/maps").read_text()
    return same and equal and mapped and freed


def test_memory_that_is_moved_keeps_its_address_and_content() -> None:
    assert run(moved, 2) == [True, True]


def two_groups(rank: Rank) -> list[float]:
    """Two groups of the same ranks, used in turn, and one after the other is closed."""
    first, second = rank.group(), rank.group(hosts=[0] * rank.size)
    value = np.array([1.0 + rank.rank], "float32")
    for group in (first, second, first):
        group.reduce(table(value, (1,)), "float32")
    del first
    second.reduce(table(value, (1,)), "float32")
    return value.tolist()


def test_groups_are_independent() -> None:
    first, second = run(two_groups, 2)
    assert first == second == [1.5]


def gathered(rank: Rank) -> list[bool]:
    """Gather rows between reductions: some bytes, none, and more than a ring holds."""
    group = rank.group()
    ones = np.ones(1000, "float32")
    right = []
    for size in (3, 0, 1_000_000):
        everyone = np.arange(size * rank.size).reshape(rank.size, size)
        mine, rows = everyone[rank.rank].copy(), np.zeros_like(everyone)
        group.gather(mine.ctypes.data, rows.ctypes.data, mine.nbytes)
        right.append(bool((rows == everyone).all()))
        group.reduce(table(ones, (1000,)), "float32")
    return [*right, bool((ones == 1).all())]


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_rows_of_all_ranks_are_gathered(size: int) -> None:
    assert run(gathered, size) == [[True] * 4] * size


def gathered_wrongly(rank: Rank, calls: str) -> str:
    group = rank.group(timeout_seconds=5)
    numbers = np.zeros(100)
    try:
        if calls[rank.rank] == "r":
            group.reduce(table(numbers, (100,)), "float64")
        else:
            size = int(calls[rank.rank])
            group.gather(numbers.ctypes.data, np.zeros(200).ctypes.data, size)
    except core.CoreError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("calls", ("12", "1r"))
def test_ranks_that_gather_otherwise_are_an_error(calls: str) -> None:
    problem = "is in another reduction, or reduces tensors of other sizes"
    assert any(problem in error for error in run(gathered_wrongly, 2, calls))


def test_a_rank_that_is_missing_is_an_error_in_half_of_the_timeout() -> None:
    assert run(connect_without_the_first, 2) == [False, True]


def connect_without_the_first(rank: Rank) -> bool:
    group = core.Group(
        rank.rank, [0, 0], [0, 0], [0, 1], "adasum", 0, 2.0, "of the test"
    )
    names, nonces = zip(*rank.gather((group.name, group.nonce)), strict=True)
    if rank.rank:
        with pytest.raises(core.CoreError, match="answer of a rank of this host"):
            group.connect(names, nonces)
    rank.gather(None)
    return bool(rank.rank)


class NoRoute:
    """A network without a route, in which nothing has started."""

    def __init__(self) -> None:
        self.aborted = 0

    def start(self, messages: np.ndarray) -> None:
        raise OSError(f"no route for {messages['send_bytes'].tolist()} bytes")

    def wait(self) -> None:
        raise AssertionError("expected a start before")

    def abort(self) -> None:
        self.aborted += 1


def without_a_route(rank: Rank) -> list[str]:
    """Every second rank is on the other host."""
    network = NoRoute()
    hosts = [0, 1, 0, 1] if rank.size == 4 else [0, 1, 0]
    group = rank.group(20, hosts, places=hosts, network=network)
    found = [str(group)]
    for _ in range(2):
        try:
            group.reduce(table(np.ones(40_000, np.float32), (40_000,)), "float32")
        except (OSError, core.CoreError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return [*found, f"{network.aborted} times"]


@pytest.mark.parametrize("size", [3, 4])
def test_an_error_of_the_network_is_raised_and_final(size: int) -> None:
    for number, found in enumerate(run(without_a_route, size)):
        on_host = 1 if (number, size) == (1, 3) else 2
        assert found[0].endswith(f", host of {on_host}"), found
        assert re.match(r"OSError: no route for \[.*\] bytes", found[1]) or re.match(
            r"Unresponsive: rank 10\d .*no route for", found[1]
        ), found
        assert re.match(r"(CoreError|Unresponsive): .*no route for", found[2]), found
        assert found[3] == "1 times"


class Pending:
    """A network that may write to the buffers of its messages until it is aborted, and does."""

    def __init__(self, has_route: bool = True) -> None:
        self.has_route, self.exchanges = has_route, list[list[tuple[int, int]]]()

    def start(self, messages: np.ndarray) -> None:
        if not self.has_route:
            raise OSError("no route")
        both = messages["receive"].tolist(), messages["receive_bytes"].tolist()
        self.exchanges.append([*zip(*both, strict=True)])

    def wait(self) -> None:
        self.exchanges.pop(0)

    def abort(self) -> None:
        for at, count in itertools.chain(*self.exchanges):
            ctypes.memset(at, 1, count)
        self.exchanges.clear()


def failing(group: core.Group, sizes: tuple[int, ...], *shards: Any) -> str:
    """Return the error of a reduction."""
    try:
        group.reduce(table(np.ones(sum(sizes), np.float32), sizes), "float32", shards)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_a_route_to_shards(rank: Rank) -> str:
    network, sizes = Pending(rank.rank != 1), (1,) * 5000
    hosts, whole = [0, 0, 1], rank.group(20)
    shards = rank.group(20, hosts, places=hosts, network=network)
    return failing(whole, sizes, (shards, range(len(sizes))))


def test_the_network_is_aborted_before_the_librarys_buffers_are_freed() -> None:
    """Tables that are long enough to be mappings of their own."""
    first, second, third = run(without_a_route_to_shards, 3)
    assert second == "OSError: no route"
    for others in (first, third):
        assert re.match(r"Unresponsive: rank 101 .*no route", others), others


def interrupt_the_first(rank: Rank) -> None:
    """Let a signal come while the first rank waits for the second one, in the library."""

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    if rank.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    elif rank.rank == 1:
        time.sleep(1)


def interrupted(rank: Rank) -> str:
    hosts, network = [0, 0, 1], Pending()
    group = rank.group(20, hosts, places=hosts, network=network)
    interrupt_the_first(rank)
    found = failing(group, (7,))
    assert not network.exchanges
    return found


def interrupted_rule(rank: Rank) -> list[str]:
    group, errors = rank.group(20), []
    ones = np.ones(3, np.float32)
    interrupt_the_first(rank)
    for _ in range(2):
        try:
            group.reduce(table(ones, (3,)), "float32", rule=lambda _: np.ones((1, 2)))
        except core.CoreError as error:
            errors.append(str(error))
    return [*errors, str(ones.tolist())]


def test_a_call_that_a_signal_interrupts_has_failed() -> None:
    first, second, third = run(interrupted, 3)
    assert re.match("CoreError: .*interrupted", first), first
    assert not second or re.match("Unresponsive: .*interrupted", second), second
    assert not third  # messages of this network are lost


def test_a_rule_that_a_signal_interrupts_has_failed_on_all_ranks() -> None:
    for error, result in run(interrupted_rule, 2):
        assert "coefficients of the rule on all ranks, but it failed" in error
        assert result == "[2.0, 2.0, 2.0]"


def test_wrong_calls_are_errors() -> None:
    group = core.Group(0, [0], [0], [0], "adasum", 0, 10.0, "of the test")
    one = np.ones(1, "float32")
    with pytest.raises(core.CoreError, match="expected a connected group"):
        group.reduce(table(one, (1,)), "float32")
    with pytest.raises(core.CoreError, match="a mapping that begins at a page"):
        core.share(one.ctypes.data + 1, 100)
    config = core._Config(core.ABI + 1, 0, 1)
    handle, name = ctypes.c_void_p(), ctypes.c_int()
    library = ctypes.CDLL(str(core.LIBRARY))
    assert library.adasum_listen(
        ctypes.byref(config),
        ctypes.byref(handle),
        ctypes.byref(name),
        ctypes.byref(name),
    )
    library.adasum_error.restype = ctypes.c_char_p
    assert (
        f"expected ABI {core.ABI}, but got {core.ABI + 1}"
        in library.adasum_error().decode()
    )
    assert not handle


def test_the_header_and_python_agree() -> None:
    header = (CORE / "adasum.h").read_text()
    assert int(re.search(r"#define ADASUM_ABI (\d+)", header)[1]) == core.ABI
    for name, number in core.DTYPES.items():
        assert f"ADASUM_{name.upper()} = {number}" in header
    for name, number in core.GROUP_OPS.items():
        assert f"ADASUM_GROUP_{name.upper()} = {number}" in header
    exported = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(core.LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    functions = set(re.findall(r"\b(adasum_\w+)\(", header))
    assert set(re.findall(r" T (\w+)", exported)) == functions


def test_without_the_library_there_is_a_reason() -> None:
    program = (
        "from pathlib import Path; from adasum_hvd import core\n"
        "core.LIBRARY = Path('/missing.so'); print(core.why_missing())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "missing.so" in shown.stdout
