"""Ranks on several hosts: network namespaces with names, links and remote shells of their own."""

from __future__ import annotations

import errno
import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import hosts as benchmark
import jobs
import pytest
from namespaces import Hosts, missing

from tests.parallel.harness.background import started
from tests.parallel.harness.cases import Case, cases_in
from tests.parallel.harness.configurations import Configuration
from tests.parallel.harness.imported import python
from tests.parallel.harness.job import Job
from tests.parallel.harness.launch import (
    environment,
    run_launcher,
    waits,
)

FILES = ("torch.test_ops", "torch.test_join")
CASES = [case for file in FILES for case in cases_in(file)]
# Over MPI every case. Over Gloo other jobs run every case on two host names, so that here are
# only cases that use the link differently or end in an error on the other host.
CHOSEN = {
    "mpi": [case.name for case in CASES],
    "gloo": [
        "case_every_dtype_and_size",
        "case_cancelling_pairs",
        "case_process_set",
        "case_mismatches_are_refused_on_all_ranks",
        "case_join",
        "case_path",
    ],
}
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def chosen(*names: str) -> list[Case]:
    return [case for case in CASES if case.name in names]


def launch_on(hosts: Hosts, backend: str, ranks: int) -> Job:
    """Run the op's cases on hosts; their remote shell stands in for ssh."""
    path = (("PATH", jobs.search_path(hosts)),)
    configuration = Configuration(FILES, backend, ranks, path)
    words = jobs.launcher(backend, ranks, hosts)
    return Job(configuration, chosen(*CHOSEN[backend]), words)


@pytest.fixture(scope="module")
def two_by_two(two_hosts: Hosts) -> Callable[[str], Job]:
    """Return a function from "gloo" or "mpi" to a job on two hosts of two ranks."""

    @functools.cache
    def get(backend: str) -> Job:
        two_hosts.offload(True)
        return launch_on(two_hosts, backend, 4)

    return get


@pytest.mark.parametrize(
    ("backend", "name"), [(b, name) for b, names in CHOSEN.items() for name in names]
)
def test_case(two_by_two, backend: str, name: str) -> None:
    two_by_two(backend).check(name)


@pytest.mark.parametrize("backend", CHOSEN)
def test_ranks_know_their_hosts(two_by_two, backend: str) -> None:
    for path in two_by_two(backend).results("case_path").values():
        assert path.startswith("levels of 2 x 2 ranks; inside a host shared memory")


UNEVEN = ["case_every_dtype_and_size", "case_process_set", "case_path"]


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def three_and_one(request: pytest.FixtureRequest, two_hosts: Hosts) -> Job:
    two_hosts.offload(True)
    path = (("PATH", jobs.search_path(two_hosts)),)
    launcher = jobs.launcher(request.param, 4, two_hosts, slots=(3, 1))
    configuration = Configuration(FILES, request.param, 4, path)
    job = Job(configuration, chosen(*UNEVEN), launcher)
    job.wait()
    return job


@pytest.mark.parametrize("name", UNEVEN)
def test_case_on_uneven_hosts(three_and_one: Job, name: str) -> None:
    three_and_one.check(name)


def test_uneven_hosts_share_memory(three_and_one: Job) -> None:
    for path in three_and_one.results("case_path").values():
        assert path.startswith("inside a host shared memory")


@pytest.mark.parametrize(
    ("engine", "form", "times"),
    [
        ("torch", "ADASUM_HVD_CORE=on", 1),
        ("torch", "ADASUM_HVD_CORE=off", 1),
        ("gloo", "ADASUM_HVD_RADICES=auto", 1),
        ("gloo", "ADASUM_HVD_RADICES=flat", 2),
    ],
)
def test_bytes_that_leave_a_host(
    two_hosts: Hosts, engine: str, form: str, times: int
) -> None:
    """Two hosts exchange the whole once each way; the flat form twice that, a rank at a time."""
    elements = 1_000_000
    two_hosts.offload(False)
    name, value = form.split("=")
    result = jobs.run(
        "gloo",
        4,
        benchmark.__file__,
        engine,
        elements,
        3,
        hosts=two_hosts,
        ADASUM_HVD_OP="on",
        **{name: value},
    )
    if name == "ADASUM_HVD_CORE":
        by = "the core (levels 2 x 2" if value == "on" else "torch's operations ("
        assert result["path"].startswith(f"reduced by {by}")
    wire = [row[2:] for row in result["rows"] if row[0] == "AdaSum"]
    assert len(wire) == 3
    for counter, packets, again in wire:
        limit = 4 * elements * 2 * (1 - 1 / 2) * times
        assert limit <= benchmark.payload(counter, packets, 0)
        assert benchmark.payload(counter, packets, again) <= 1.05 * limit
        full_packet = benchmark.HEADER_BYTES + benchmark.SEGMENT_BYTES
        assert counter <= 1.10 * limit + again * full_packet


ROUND_TRIP = """
import socket, sys, time
for _ in range(2):  # the first asks for the address, too
    with socket.socket() as caller:
        started = time.perf_counter()
        refused = caller.connect_ex((sys.argv[1], 9))
        seconds = time.perf_counter() - started
print(refused, seconds)
"""


def test_delay(tmp_path: Path) -> None:
    """Three hosts, each at twice the delay from there and back to the others."""
    program = tmp_path / "round_trip.py"
    program.write_text(ROUND_TRIP)
    with Hosts(3, delay=20) as hosts:
        for here, there in itertools.permutations(hosts.names, 2):
            printed = hosts.run(here, f"{sys.executable} {program} {there}")
            refused, seconds = printed.split()
            assert int(refused) == errno.ECONNREFUSED
            assert 0.04 <= float(seconds) <= 0.4


LOOP = """
import sys, time, torch
from pathlib import Path
import adasum_hvd.torch as hvd
hvd.init()
for step in range(1000000):
    try:
        hvd.allreduce(torch.ones(1000000), op=hvd.Adasum, name="tensor")
    except Exception as error:
        print(f"ENDED rank {hvd.rank()}: {error}", flush=True)
        Path(sys.argv[1], f"ended.{hvd.rank()}").touch()
        while len(list(Path(sys.argv[1]).glob("ended.*"))) < 4:
            time.sleep(0.1)  # horovodrun ends the others with the first
        sys.exit(1)
    if step == 5:
        Path(sys.argv[1], f"running.{hvd.rank()}").touch()
"""


Cut = tuple[int, str, float]  # status, output, seconds after the cut


def cut_a_link(folder: Path) -> Cut:
    """Cut a host's link while a loop runs, and return how it ended."""
    program = folder / "loop.py"
    program.write_text(LOOP)
    cut_at = []
    with Hosts(2) as hosts:
        path = ("PATH", jobs.search_path(hosts))
        variables = environment((path, *waits(10)))
        words = [*jobs.launcher("gloo", 4, hosts), *python()]

        def cut() -> None:
            limit = time.monotonic() + 60
            while time.monotonic() < limit:
                if len(list(folder.glob("running.*"))) == 4:
                    cut_at.append(time.monotonic())
                    hosts.run("switch", "ip link set dev port2 down")
                    return
                time.sleep(0.1)

        thread = threading.Thread(target=cut)
        thread.start()
        status, output = run_launcher(
            [*words, str(program), str(folder)], variables, 120
        )
        ended = time.monotonic()
        thread.join()
    assert cut_at, output[-3000:]
    return status, output, ended - cut_at[0]


@pytest.fixture(scope="module", autouse=True)
def link_is_cut(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Cut]]]:
    """Cut a link next to the other tests, because that job mostly waits."""
    cut = functools.partial(cut_a_link, tmp_path_factory.mktemp("link"))
    test = test_a_link_that_goes_down_ends_every_rank.__name__
    yield from started(request, {test: cut}, 1)


def test_a_link_that_goes_down_ends_every_rank(
    link_is_cut: dict[str, Future[Cut]],
) -> None:
    """Nobody waits for ever for a host that is no longer there."""
    (cut,) = link_is_cut.values()
    status, output, seconds = cut.result()
    assert status != 0
    assert output.count("ENDED rank") == 4, output[-3000:]
    assert seconds < 40
