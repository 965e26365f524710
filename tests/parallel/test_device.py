"""The op for device tensors in real Horovod, on simulated devices; tests/gpu has real ones."""

from __future__ import annotations

import json
import os
import platform
import re
import sys

import pytest
from jobs import run_launcher

from tests.parallel.harness.launch import (
    Configuration,
    case_names,
    command,
    environment,
    launch,
)
from tests.parallel.harness.simulated_horovod import make

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the simulated device is for x86-64"
)
CASES = "device.test_simulated"
SLICED = (("ADASUM_HVD_REPLICATE_BYTES", "0"),)
TWO_STREAMS = (("HOROVOD_NUM_NCCL_STREAMS", "2"),)
ASYNCHRONOUS = (("HOROVOD_ENABLE_ASYNC_COMPLETION", "1"),)
ONE_HOST = [
    Configuration(CASES, "gloo", 1),
    Configuration(CASES, "gloo", 2, SLICED + TWO_STREAMS),
    Configuration(CASES, "gloo", 3),
    Configuration(CASES, "gloo", 4, SLICED),
]
OTHERS = [
    Configuration(
        CASES, "gloo", 3, (*SLICED, ("ADASUM_TEST_HOSTS", "1,2")),
        hosts="localhost:1,127.0.0.1:2",
    ),
    Configuration(
        CASES, "gloo", 4, (*SLICED, *ASYNCHRONOUS, ("ADASUM_TEST_HOSTS", "2,2")),
        hosts="localhost:2,127.0.0.1:2",
    ),
    Configuration(
        CASES, "gloo", 4,
        (("ADASUM_HVD_GROUP_OP", "average"), ("ADASUM_HVD_GROUP_SIZE", "2")),
    ),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def simulated_horovod() -> None:
    os.environ["ADASUM_SIMULATED_HOROVOD"] = str(make())


@pytest.mark.parametrize("name", case_names(CASES))
@pytest.mark.parametrize("configuration", ONE_HOST + OTHERS, ids=str)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)


@pytest.mark.parametrize("configuration", ONE_HOST + OTHERS, ids=str)
def test_all_ranks_have_the_same_bits(outcome_of, configuration: Configuration) -> None:
    digests = outcome_of(configuration).results("case_every_dtype_and_size")
    assert len(digests) == configuration.ranks
    assert len(set(digests.values())) == 1


@pytest.mark.parametrize(
    ("configuration", "words"),
    [(ONE_HOST[3], "devices: NCCL"), (OTHERS[1], "NCCL, levels of 2 x 2 ranks")],
    ids=str,
)
def test_ranks_know_their_path(outcome_of, configuration, words: str) -> None:
    paths = outcome_of(configuration).results("case_host_tensors_beside_them")
    assert len(paths) == configuration.ranks
    assert all(path.endswith(words) for path in paths.values()), paths


# A rank that runs out of memory while an earlier reduction is under way.
WITHOUT_MEMORY = """
import os, sys
import numpy as np
from pathlib import Path
from tests.parallel.harness.simulated_horovod import Horovod
hvd = Horovod(Path(os.environ["ADASUM_SIMULATED_HOROVOD"]))
hvd.init()
rank = hvd.rank()
small, large = np.full(300_000, rank + 1, np.float32), np.ones(1_000_000)
other = np.ones(300_000, np.float16)
hvd.adasum(small)
if rank == 1:
    hvd.library.horovod_simulated_memory_limit(1 << 20)
# Of three dtypes, which Horovod does not fuse: the first is under way when the second
# fails, and the third follows, where there are two streams on the first one's.
started = [hvd.enqueue([small]), hvd.enqueue([large]), hvd.enqueue([other])]
for one in started:
    try:
        hvd.wait(one)
        print(f"rank {rank}: a result", flush=True)
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
hvd.shutdown()
print(f"rank {rank}: goes on", flush=True)
sys.exit(3)
"""


def run_without_memory(tmp_path, **variables: str) -> tuple[int, str]:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_MEMORY)
    words = [*command("gloo", 2), sys.executable, str(script)]
    return run_launcher(words, {**environment(), **variables}, 120)


def test_a_rank_without_memory_says_so_and_ends(tmp_path) -> None:
    status, output = run_without_memory(tmp_path)
    assert status != 0
    assert re.search(
        r"\[1\]: AdaSum: Horovod cannot go on, this process ends: "
        r"AdaSum: required \d+ bytes of device memory",
        output,
    ), output
    assert "rank 1: goes on" not in output
    assert "NCCL hangs" not in output


@pytest.mark.parametrize("streams", ["1", "2"])
def test_ranks_of_an_elastic_job_go_on_after_one_had_no_memory(
    tmp_path, streams: str
) -> None:
    _, output = run_without_memory(
        tmp_path, HOROVOD_ELASTIC="1", HOROVOD_NUM_NCCL_STREAMS=streams
    )
    assert re.search(r"rank 1: AdaSum: required \d+ bytes of device memory", output)
    assert "rank 0: goes on" in output, output
    assert "rank 1: goes on" in output, output
    assert not re.search(r"NCCL hangs|that has ended", output), output
    # Of the second and third no rank has a result; the first may have ended in time.
    assert output.count("rank 0: a result") <= 1, output
    assert re.search(r"rank 0: AdaSum: Horovod shut down while", output), output


def test_timeline_shows_the_phases_and_results_stay(outcome_of, tmp_path) -> None:
    file = tmp_path / "timeline.json"
    timed = Configuration(
        CASES, "gloo", 3, (*SLICED, ("HOROVOD_TIMELINE", str(file)), *ASYNCHRONOUS)
    )
    outcome = launch(timed)
    for name in case_names(CASES):
        assert not outcome.raise_failures(name, 3)
    text = file.read_text().rstrip().rstrip(",").removesuffix("]")
    events = [event.get("name", "") for event in json.loads(text.rstrip(",\n") + "]")]
    for phase in ("EXCHANGE_GRAM", "SOLVE", "COMBINE_GATHER"):
        assert f"ADASUM_{phase}" in events
        assert f"ADASUM_DELTA_{phase}" in events
    case = "case_every_dtype_and_size"
    assert outcome.results(case) == outcome_of(ONE_HOST[2]).results(case)


# Threads that submit tensors of the host while the ranks shut down: TensorFlow's do so.
SUBMITTED_AT_THE_END = """
import os, threading, time
import numpy as np
from pathlib import Path
from tests.parallel.harness.simulated_horovod import Horovod
hvd = Horovod(Path(os.environ["ADASUM_SIMULATED_HOROVOD"]))
hvd.init()
started = [[] for _ in range(6)]
def submit(thread):
    while hvd.library.horovod_is_initialized():
        name = f"{thread}.{len(started[thread])}"
        started[thread].append(hvd.enqueue([np.ones(3)], [name], device=-1))
threads = [threading.Thread(target=submit, args=(k,)) for k in range(6)]
for thread in threads:
    thread.start()
time.sleep(0.1)
begin = time.monotonic()
hvd.shutdown()
print(f"ended after {time.monotonic() - begin:.1f} s", flush=True)
for thread in threads:
    thread.join()
def wait():
    for one in started[0] + sum(started[1:], []):
        try:
            hvd.wait(one)
        except RuntimeError:
            pass
waiting = threading.Thread(target=wait, daemon=True)
waiting.start()
waiting.join(10)
print("lost" if waiting.is_alive() else f"all came back", flush=True)
os._exit(0)
"""


def test_what_is_submitted_while_ranks_shut_down_comes_back(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUBMITTED_AT_THE_END)
    words = [*command("gloo", 2), sys.executable, str(script)]
    _, output = run_launcher(words, environment(), 120)
    assert output.count("all came back") == 2, output
    assert all(float(s) < 4 for s in re.findall(r"ended after (\S+) s", output)), output
