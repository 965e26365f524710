"""The rendezvous of ranks on horovodrun's real server; elastic jobs are in tests/soak."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator

import pytest
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.elastic.rendezvous import GET_RANK_AND_SIZE
from horovod.runner.http.http_server import RendezvousServer

from adasum_hvd.horovod.elastic import arrival

LIMIT_SECONDS = 60
FORK = multiprocessing.get_context("fork")
STARTED, NO_SLOT = 7, 0  # exit statuses


def test_assignment_is_horovodruns_reply() -> None:
    slot = SlotInfo("here", 0, 1, 2, 3, 4, 5)
    values = map(int, slot.to_response_string().split(","))
    assignment = dict(zip(arrival.ASSIGNMENT, values, strict=True))
    expected = {n: getattr(slot, n[8:].lower()) for n in arrival.ASSIGNMENT}
    assert assignment == expected
    assert GET_RANK_AND_SIZE == "rank_and_size"


@pytest.fixture
def port() -> Iterator[int]:
    server = RendezvousServer()
    number = server.start()
    server.init([])
    yield number
    server.stop()


def run_rank(rank: int, size: int, port: int, seconds: float) -> None:
    """Run one rank; its exit status is STARTED or NO_SLOT."""
    time.sleep(seconds)
    assignment = dict.fromkeys(arrival.ASSIGNMENT, "0") | {"HOROVOD_ELASTIC": "1"}
    assignment |= {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)}
    assignment |= {
        "HOROVOD_HOSTNAME": "here",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    }
    os.environ.update(assignment, HOROVOD_GLOO_RENDEZVOUS_PORT=str(port))
    arrival.MISSING_SECONDS = 1.0
    arrival.init_together(lambda: os._exit(STARTED), again=False)


def statuses(port: int, size: int, seconds: dict[int, float]) -> list[int | None]:
    """Return the exit statuses of ranks that start with these delays in seconds."""
    ranks = [
        FORK.Process(target=run_rank, args=(rank, size, port, late))
        for rank, late in seconds.items()
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_SECONDS)
        process.kill()
    return [process.exitcode for process in ranks]


def test_ranks_start_when_all_have_arrived(port: int) -> None:
    began = time.monotonic()
    assert statuses(port, 3, {0: 0.0, 1: 0.5, 2: 0.0}) == [STARTED] * 3
    assert time.monotonic() - began > 0.5


@pytest.mark.parametrize("present", [0, 1])
def test_ranks_request_new_assignments_if_one_is_missing(
    port: int, present: int
) -> None:
    # This server has no slots, so a rank that requests one ends.
    assert statuses(port, 2, {present: 0.0}) == [NO_SLOT]


def test_a_missing_server_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv("HOROVOD_HOSTNAME", "here")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "0")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    with pytest.raises(RuntimeError, match="expected a reply from horovodrun at"):
        arrival.init_together(lambda: None, again=True)


def test_other_jobs_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    started: list[int] = []
    arrival.init_together(lambda: started.append(1), again=False)
    assert started == [1]
