"""Facts that show only outside a job: messages, timelines, settings that differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import REPOSITORY, command, environment, run_launcher


def start(
    tmp_path: Path, backend: str, ranks: int, script: str, timeout=120, **variables: str
):
    """Run `script` on real ranks and return (exit status, output)."""
    program = tmp_path / "script.py"
    program.write_text(script)
    words = [*command(backend, ranks), *python(), str(program)]
    return run_launcher(words, environment(tuple(variables.items())), timeout)


CALLS = """
import sys, torch
import adasum_hvd.torch as hvd
hvd.init()
for step in range(20):
    for k in range(5):
        hvd.allreduce(torch.ones(10), op=OP, name=f"tensor.{k}")
print("DONE")
"""


def negotiations(tmp_path, op: str, **variables: str) -> int:
    """Count the coordinator's negotiation messages in 20 rounds of 5 tensors on 2 ranks."""
    variables |= {"HOROVOD_LOG_LEVEL": "trace", "HOROVOD_CYCLE_TIME": "0.1"}
    script = CALLS.replace("OP", repr(op))
    status, output = start(tmp_path, "gloo", 2, script, **variables)
    assert status == 0, output[-2000:]
    assert output.count("DONE") == 2
    return output.count("Adding messages from process-set rank")


def test_response_cache_hits(tmp_path):
    """A repeated AdaSum is negotiated once per tensor, as a repeated Average is."""
    # Ranks may arrive in different cycles, which costs messages for each new tensor; how many
    # is a matter of load. Without the cache each of the 100 calls costs at least one.
    average, adasum = (negotiations(tmp_path, op) for op in ("average", "adasum"))
    assert 5 <= average <= 60
    assert 5 <= adasum <= 60
    assert negotiations(tmp_path, "adasum", HOROVOD_CACHE_CAPACITY="0") >= 100


def test_timeline_names_the_phases(tmp_path):
    timeline = tmp_path / "timeline.json"
    script = """
import time
import torch
import adasum_hvd.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(100000), op=hvd.Adasum, name="plain")
hvd.allreduce(torch.ones(100000), op=hvd.AdasumDelta, name="weight")
hvd.allreduce(torch.ones(1), op=hvd.Sum, name="last")
time.sleep(1)  # Horovod's writer leaves the events that it has not come to at shutdown
hvd.shutdown()
"""
    status, output = start(tmp_path, "gloo", 2, script, HOROVOD_TIMELINE=str(timeline))
    assert status == 0, output[-2000:]
    events = json.loads(timeline.read_text().rstrip().rstrip(",").rstrip("]") + "]")
    names = {event.get("name") for event in events}
    for phase in ("REDUCE_SCATTER_GRAM", "COEFFICIENTS", "COMBINE_ALLGATHER"):
        assert f"ADASUM_{phase}" in names
        assert f"ADASUM_DELTA_{phase}" in names
    tensors = {e["args"].get("name") for e in events if e.get("name") == "process_name"}
    assert "allreduce.adasum.delta/weight" in tensors


def test_off_hands_on_to_horovod(tmp_path):
    script = """
import torch
import adasum_hvd.torch as hvd
hvd.init()
result = hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum, name="x")
assert torch.equal(result, torch.tensor([1.0, 2.0]))
assert hvd.counters().calls == 0
print("DONE")
"""
    status, output = start(tmp_path, "mpi", 2, script, ADASUM_HVD_OP="off")
    assert status == 0 and output.count("DONE") == 2, output[-2000:]
    status, output = start(tmp_path, "gloo", 2, script, ADASUM_HVD_OP="off")
    assert status != 0
    assert "No Adasum operation enabled" in output, output[-2000:]


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_settings_that_differ_are_an_error_on_all_ranks(tmp_path, backend):
    script = """
import os, pytest
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["ADASUM_HVD_GROUP_SIZE"] = "2" if rank == "1" else "1"
import adasum_hvd.torch as hvd
with pytest.raises(ValueError, match="expected the same ADASUM_HVD_.* got group_size=2 on rank 1"):
    hvd.init()
print("DONE")
"""
    status, output = start(tmp_path, backend, 3, script)
    assert status == 0 and output.count("DONE") == 3, output[-2000:]


def test_levels_that_do_not_fit_are_an_error_on_all_ranks(tmp_path):
    script = """
import pytest
import adasum_hvd.torch as hvd
with pytest.raises(ValueError, match="expected levels whose .* then to 6 ranks.* but got 3x2"):
    hvd.init()
print("DONE")
"""
    status, output = start(tmp_path, "mpi", 6, script, ADASUM_HVD_RADICES="3x2")
    assert status == 0 and output.count("DONE") == 6, output[-2000:]


def test_kernels_and_threads_may_differ_and_nothing_stays_after_shutdown(tmp_path):
    script = """
import os, pathlib, torch
rank = os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["ADASUM_HVD_NUM_THREADS"] = str(int(rank) + 1)
os.environ["ADASUM_HVD_KERNELS"] = "portable" if rank == "1" else ""
import adasum_hvd.torch as hvd
hvd.init()
mine = torch.randn(100000, generator=torch.Generator().manual_seed(hvd.rank()))
result = hvd.allreduce(mine, op=hvd.Adasum, name="x")
assert all(torch.equal(result, other) for other in hvd.allgather_object(result))

def held():
    processes = [os.path.realpath(file) for file in pathlib.Path("/proc/self/fd").iterdir()]
    names = [(task / "comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
    return (
        pathlib.Path("/proc/self/maps").read_text().count("memfd:adasum_hvd"),
        sum("pidfd" in name for name in processes),
        names.count("adasum\\n"),
        int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )

# Fused: the op holds a copy, which the other rank has mapped.
hvd.grouped_allreduce([torch.ones(6_000_000), torch.ones(2_000_000)], op=hvd.Adasum, name="large")
before = held()
assert before[0] == 4 and before[1] <= 1 and before[2] == 1 + hvd.rank(), before  # it is watched
hvd.shutdown()
after = held()
assert after[:3] == (0, 0, 0), after
assert before[3] - after[3] > 30_000_000, (before, after)
import pytest
with pytest.raises(RuntimeError, match="expected a process in which MPI has not ended"):
    hvd.init()
print("DONE")
"""
    status, output = start(tmp_path, "mpi", 2, script)
    assert status == 0 and output.count("DONE") == 2, output[-2000:]


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_job_that_has_removed_a_process_set_ends_well(tmp_path, backend):
    script = """
import torch
import adasum_hvd.torch as hvd
hvd.init()
some = hvd.add_process_set([0, 1])
if hvd.rank() < 2:
    hvd.allreduce(torch.ones(5), op=hvd.Adasum, name="some", process_set=some)
hvd.remove_process_set(some)
hvd.allreduce(torch.ones(5), op=hvd.Adasum, name="all")
print("DONE")
"""
    status, output = start(tmp_path, backend, 3, script)
    assert status == 0 and output.count("DONE") == 3, output[-2000:]


def test_example():
    program = str(REPOSITORY / "examples/torch_digits.py")
    words = [*command("mpi", 3), *python(), program, "--epochs", "5"]
    status, output = run_launcher(words, environment(), 200)
    assert status == 0, output[-2000:]
    (accuracy,) = re.findall(r"test accuracy (\S+)", output)
    assert float(accuracy) > 0.5


ADDING = """
import sys, time, torch
from pathlib import Path
import adasum_hvd.torch as hvd
hvd.init()
rank, folder = hvd.rank(), Path(sys.argv[0]).parent
if rank == 1:
    time.sleep(1)
else:
    try:
        hvd.add_process_set([0, 2])
    except ValueError as error:
        assert "shutting down" in str(error)
        print("REFUSED", flush=True)
hvd.shutdown()
(folder / f"ended.{rank}").touch()
while len(list(folder.glob("ended.*"))) < 3:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_rank_leaves_while_others_add_a_process_set(tmp_path: Path, backend: str):
    """Horovod would negotiate the end of what not all ranks have, and abort, or wait for ever."""
    status, output = start(tmp_path, backend, 3, ADDING, timeout=60)
    assert status == 0 and output.count("REFUSED") == 2, output[-3000:]
    assert "terminate called" not in output
