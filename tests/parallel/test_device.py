"""The op for device tensors in real Horovod, on simulated devices; tests/gpu has real ones."""

from __future__ import annotations

import ctypes
import json
import platform
import re
import sys

import pytest

from adasum_hvd.horovod import binding
from tests.parallel.harness.configurations import (
    ALL_SIMULATED,
    ASYNCHRONOUS,
    SIMULATED_ONE_HOST,
    SIMULATED_TWO_HOSTS,
    SLICED,
    Configuration,
    simulated,
)
from tests.parallel.harness.job import Job
from tests.parallel.harness.launch import command, environment, run_launcher
from tests.parallel.harness.simulated_horovod import make

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the simulated device is for x86-64"
)
EVERY_DTYPE = "case_every_dtype_and_size"


@pytest.mark.needs(EVERY_DTYPE)
@pytest.mark.parametrize("configuration", ALL_SIMULATED, ids=str)
def test_all_ranks_have_the_same_bits(job, configuration: Configuration) -> None:
    digests = job(configuration).results(EVERY_DTYPE)
    assert len(digests) == configuration.ranks
    assert None not in digests.values(), "a rank's case failed"
    assert len(set(digests.values())) == 1


@pytest.mark.parametrize(
    ("streams", "completion"), [("2", "1"), ("1", "1"), ("2", "0")]
)
def test_streams_that_may_wait_for_each_other(monkeypatch, streams, completion) -> None:
    """On an H200 two ranks hung with two streams and asynchronous completion."""
    monkeypatch.setenv("HOROVOD_NUM_NCCL_STREAMS", streams)
    monkeypatch.setenv("HOROVOD_ENABLE_ASYNC_COMPLETION", completion)
    error = binding.settings_error(ctypes.CDLL(str(make())))
    words = "HOROVOD_NUM_NCCL_STREAMS: expected 1 with HOROVOD_ENABLE_ASYNC_COMPLETION"
    assert error.startswith(words) is (streams == "2" and completion == "1")


@pytest.mark.needs("case_host_tensors_next_to_device_tensors")
@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (SIMULATED_ONE_HOST[3], "devices: NCCL"),
        (SIMULATED_TWO_HOSTS, "NCCL, levels of 2 x 2 ranks"),
    ],
    ids=str,
)
def test_ranks_know_their_path(job, configuration, words: str) -> None:
    paths = job(configuration).results("case_host_tensors_next_to_device_tensors")
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
    return run_launcher(
        words,
        environment() | {"ADASUM_SIMULATED_HOROVOD": str(make())} | variables,
        120,
    )


def test_a_rank_without_memory_says_so_and_ends(tmp_path) -> None:
    status, output = run_without_memory(tmp_path)
    assert status != 0
    assert re.search(
        r"\[1\]: AdaSum: Horovod cannot go on, this process ends: "
        r"AdaSum: expected \d+ bytes of device memory",
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
    assert re.search(r"rank 1: AdaSum: expected \d+ bytes of device memory", output)
    assert "rank 0: goes on" in output, output
    assert "rank 1: goes on" in output, output
    assert not re.search(r"NCCL hangs|that has ended", output), output
    # Of the second and third no rank has a result; the first may have ended in time.
    assert output.count("rank 0: a result") <= 1, output
    assert re.search(r"rank 0: AdaSum: Horovod shut down during", output), output


@pytest.mark.needs(EVERY_DTYPE)
@pytest.mark.parametrize("configuration", [SIMULATED_ONE_HOST[2]], ids=str)
def test_timeline_shows_the_phases_and_results_stay(
    job, tmp_path, configuration: Configuration
) -> None:
    expected = job(configuration).results(EVERY_DTYPE)
    file = tmp_path / "timeline.json"
    variables = (*SLICED, ("HOROVOD_TIMELINE", str(file)), *ASYNCHRONOUS)
    timed = Job(simulated(3, variables))
    for case in timed.cases:
        assert not timed.reason_to_skip(case)
    assert timed.results(EVERY_DTYPE) == expected
    timed.close()
    text = file.read_text().rstrip().rstrip(",").removesuffix("]")
    events = [event.get("name", "") for event in json.loads(text.rstrip(",\n") + "]")]
    for phase in ("REDUCE_SCATTER_GRAM", "COEFFICIENTS", "COMBINE_ALLGATHER"):
        assert f"ADASUM_{phase}" in events
        assert f"ADASUM_DELTA_{phase}" in events


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
    variables = {"ADASUM_SIMULATED_HOROVOD": str(make())}
    _, output = run_launcher(words, environment() | variables, 120)
    assert output.count("all came back") == 2, output
    assert all(float(s) < 4 for s in re.findall(r"ended after (\S+) s", output)), output
