"""Jobs on systems that limit them, and jobs in which one operation takes long."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.parallel.harness.background import started
from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import command, environment, run_launcher

End = tuple[int, str]  # exit status, output


def start(
    backend: str, ranks: int, script: str, framework: str = "torch", **variables: str
) -> End:
    """Run `script` on real ranks and return how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "script.py")
        program.write_text(script)
        words = [*command(backend, ranks), *python(framework), str(program)]
        return run_launcher(words, environment(tuple(variables.items())), 120)


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[End]]]:
    """Start the selected tests' jobs that wait most of the time, by the tests' names."""
    yield from started(request, WAITING, 5)


@pytest.fixture
def ended(ends: dict[str, Future[End]], request: pytest.FixtureRequest) -> End:
    """Return how the test's waiting job ended."""
    return ends[request.node.name].result()


LIMITED = """
import contextlib, os, pathlib, resource
import torch
if os.environ["HOROVOD_RANK"] == "0":
    torch.set_flush_denormal(True)
import adasum_hvd.torch as hvd
from adasum_hvd.torch import wire
hvd.init()

def report(name, value):
    print(f"{name} {hvd.rank()}: {value}", flush=True)

def bucket(elements):
    return wire.zeros(elements, torch.float32, torch.device("cpu"))

def reduce(tensor, name, process_set=hvd.global_process_set):
    return hvd.allreduce_(tensor, name=name, op=hvd.Adasum, process_set=process_set)

# Denormal numbers, on one rank with a mode that flushes them to zero.
for elements in (1000, 2_000_000):
    x = torch.full((elements,), 3e-40)
    x[::2] = 1e-3
    bits = reduce(x, f"denormal.{elements}").view(torch.int32)
    report("bits", (bits.sum().item(), bits[1].item()))

# Process sets that get other numbers of threads.
alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())][hvd.rank()]

def threads():
    names = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended
            names[task.name] = (task / "comm").read_text()
    return {task for task, name in names.items() if name == "adasum\\n"}

reduce(torch.ones(2_000_000), "alone", alone)
before = threads()
reduce(torch.ones(2_000_000), "all")
reduce(torch.ones(2_000_000), "alone", alone)
report("threads", "stay" if threads() == before else (before, threads()))

# Many buckets.
open_before = len(os.listdir("/proc/self/fd"))
buckets = [bucket(400_000) for _ in range(50)]
for k, one in enumerate(buckets):
    reduce(one.fill_(1.0), f"bucket.{k}")
report("descriptors", len(os.listdir("/proc/self/fd")) - open_before)

# More than the system has.
elements = 1 << 38
report("tebibyte", wire.binding.shared_memory(wire.LIBRARY, 4 * elements))

# An address space that one rank has used up.
flat = bucket(25_000_000).fill_(1.0 + hvd.rank())
if hvd.rank() == 1:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 150_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for again in range(2):
    reduce(flat, "flat")
report("reduced", flat[0].item())
report("path", wire.binding.path(wire.LIBRARY))
"""


@pytest.fixture(scope="module")
def limited() -> str:
    """Return the output of three ranks that live with limits."""
    return start("gloo", 3, LIMITED)[1]


def reports(output: str, name: str) -> list[str]:
    """Return what the ranks have reported, in their order."""
    return [value for _, value in sorted(re.findall(rf"{name} (\d): (.*)", output))]


def test_a_rank_that_flushes_denormals_has_the_same_bits(limited: str) -> None:
    bits = reports(limited, "bits")
    assert len(bits) == 6
    assert len(set(bits)) == 2
    assert not any(value.endswith(", 0)") for value in bits)


def test_threads_stay_when_process_sets_alternate(limited: str) -> None:
    assert reports(limited, "threads") == ["stay"] * 3


def test_buckets_take_no_descriptors(limited: str) -> None:
    assert all(int(more) <= 2 for more in reports(limited, "descriptors"))


def test_memory_that_the_system_lacks_is_refused(limited: str) -> None:
    assert reports(limited, "tebibyte") == ["None"] * 3
    assert len(re.findall(r"expected 1099511627776 bytes, but", limited)) == 3


def test_a_bucket_that_one_rank_cannot_map(limited: str) -> None:
    """It warns once, and all go on by copies."""
    reduced = reports(limited, "reduced")
    assert len(reduced) == 3, limited[-3000:]
    assert len(set(reduced)) == 1
    paths = reports(limited, "path")
    assert all(path.endswith("shared memory, staged") for path in paths), paths
    warned = re.findall(r"\[(\d)\]: AdaSum: expected to share the memory", limited)
    assert warned == ["1"]


LONG = """
import os, time, torch, horovod.torch
import adasum_hvd.torch as hvd
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # all ranks, so that it takes longer
hvd.init()
hvd.allreduce(torch.zeros(1), name="first", op=hvd.Adasum)
began = time.monotonic()
horovod.torch.allreduce_(torch.ones(200_000_000), name="long", op=hvd.Average)
print(f"DONE after {time.monotonic() - began:.1f} s", flush=True)
"""
SHORT_LIMITS = {
    "HOROVOD_STALL_CHECK_DISABLE": "1",
    "ADASUM_HVD_STALL_SECONDS": "1",
    "ADASUM_HVD_TIMEOUT_SECONDS": "1",
    "ADASUM_HVD_CHECKPOINT_SECONDS": "1",
}


def test_one_long_operation_ends_no_process() -> None:
    status, output = start("gloo", 3, LONG, **SHORT_LIMITS)
    assert status == 0, output[-3000:]
    assert "cannot go on" not in output
    assert output.count("DONE") == 3


MISSING = """
import torch
from horovod.common.exceptions import HorovodInternalError
import adasum_hvd.torch as hvd
hvd.init()
try:
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(10), name="alone", op=hvd.Adasum)
    hvd.barrier()
except HorovodInternalError as error:
    print(f"ENDED {hvd.rank()}: {error}", flush=True)
"""


def missing(warnings_after: str | None) -> End:
    variables = {"ADASUM_HVD_STALL_SECONDS": "6"}
    if warnings_after:
        variables["HOROVOD_STALL_CHECK_TIME_SECONDS"] = warnings_after
    return start("gloo", 2, MISSING, **variables)


@pytest.mark.parametrize("warnings_after", ["1", None])
def test_the_limit_of_a_missing_tensor_does_not_depend_on_warnings(
    warnings_after: str | None, ended: End
) -> None:
    _, output = ended
    assert output.count("ENDED") == 2, output[-3000:]
    assert re.search(r'tensor "\S*alone" from rank 0 and not from rank 1', output), (
        output
    )


# Over MPI: what a failed reduction leaves, and how long the script goes on.
AFTER_A_FAILURE = """
import gc, os, signal, threading, time, weakref
import numpy as np, torch
from horovod.common.exceptions import HorovodInternalError
import adasum_hvd.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1000), op=hvd.Adasum, name="small")
calls = hvd.counters().calls

def stop():
    while hvd.counters().calls == calls:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)

if hvd.rank() == 1:
    threading.Thread(target=stop, daemon=True).start()
memory = np.ones(20_000_000, np.float32)
tensor, alive = torch.from_numpy(memory), weakref.ref(memory)
try:
    hvd.allreduce_(tensor, op=hvd.Adasum, name="gradient")
except HorovodInternalError as error:
    raised = time.monotonic()
    error.__traceback__ = None
del tensor, memory
gc.collect()
print("KEPT" if alive() is not None else "FREED", flush=True)
while time.monotonic() < raised + 11:
    time.sleep(0.1)
print("SAVED a checkpoint", flush=True)
"""


def after_a_failure() -> End:
    return start(
        "mpi", 2, AFTER_A_FAILURE, ADASUM_HVD_LOCAL="off",
        ADASUM_HVD_TIMEOUT_SECONDS="3", ADASUM_HVD_CHECKPOINT_SECONDS="12",
    )  # fmt: skip


def test_after_a_failure_over_mpi(ended: End) -> None:
    """Memory into which MPI may still receive is kept; the script has time for a checkpoint."""
    status, output = ended
    assert status != 0
    assert "KEPT" in output, output[-3000:]
    assert "SAVED" in output, output[-3000:]
    assert "ADASUM_HVD_CHECKPOINT_SECONDS" in output


# A rank has stopped; the limits that may follow the error are long.
ENDS_AFTER_A_FAILURE = """
import os, signal, sys, threading, time
from horovod.common.exceptions import HorovodInternalError
import adasum_hvd.FRAMEWORK as hvd
if "FRAMEWORK" == "torch":
    from torch import ones
    Error = HorovodInternalError
else:
    import tensorflow as tf
    ones, Error = (lambda count: tf.ones([count])), tf.errors.OpError
hvd.init()
calls = hvd.counters().calls

def stop():
    while hvd.counters().calls == calls:
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGSTOP)

if hvd.rank() == 1:
    threading.Thread(target=stop, daemon=True).start()
try:
    hvd.allreduce(ones(20_000_000), op=hvd.Adasum, name="gradient")
except Error as error:
    print("FAILED", flush=True)
    END
"""


def ends_after_a_failure(backend: str, framework: str, end: str) -> End:
    script = ENDS_AFTER_A_FAILURE.replace("FRAMEWORK", framework).replace("END", end)
    return start(
        backend, 3, script, framework, ADASUM_HVD_TIMEOUT_SECONDS="5",
        ADASUM_HVD_CHECKPOINT_SECONDS="300", HOROVOD_GLOO_TIMEOUT_SECONDS="300",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "framework", "end"),
    [
        ("mpi", "torch", "sys.exit(3)"),
        ("mpi", "tensorflow", "raise"),
        ("gloo", "torch", "hvd.shutdown(); print('SAVED', flush=True); sys.exit(3)"),
        ("gloo", "tensorflow", "raise"),
    ],
    ids=lambda value: value.split(".")[-1].partition("(")[0],
)
def test_the_end_of_a_script_ends_the_wait_for_a_stopped_rank(
    backend: str, framework: str, end: str, ended: End
) -> None:
    """The time for a checkpoint, and Gloo's limit, are for a script that still runs."""
    status, output = ended
    assert status != 0 and output.count("FAILED") == 2, output[-3000:]
    assert "ended after" not in output, output[-3000:]
    assert ("SAVED" in output) == ("SAVED" in end), output[-3000:]


# By the tests' names.
WAITING = {
    test_the_limit_of_a_missing_tensor_does_not_depend_on_warnings.__name__: missing,
    test_after_a_failure_over_mpi.__name__: after_a_failure,
    test_the_end_of_a_script_ends_the_wait_for_a_stopped_rank.__name__: ends_after_a_failure,
}
