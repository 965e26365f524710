"""Ranks that torchrun, a scheduler's variables or `adasum-hvd exec` have started: no horovodrun."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import (
    REPOSITORY,
    environment,
    run_launcher,
    torchrun,
)

EXEC = [sys.executable, "-m", "adasum_hvd", "exec"]
SECONDS = 240  # for one job, on a machine that others use


def write(tmp_path: Path, script: str) -> str:
    program = tmp_path / "script.py"
    program.write_text(script)
    return str(program)


def free_port() -> int:
    """Return a port that is free, and so is the next one."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("", 0))
            try:
                next_one.bind(("", one.getsockname()[1] + 1))
            except OSError:
                continue
            return one.getsockname()[1]


def start_each(
    words: list[str], environments: list[dict[str, str]]
) -> list[tuple[int, str]]:
    """Start a process with each environment, as schedulers do; return statuses and outputs."""
    common = environment((("MASTER_PORT", str(free_port())),))
    ranks = [
        subprocess.Popen(
            words, env=common | own, cwd=REPOSITORY, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for own in environments
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        return [
            (rank.returncode, output)
            for rank, output in zip(ranks, outputs, strict=True)
        ]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def check_done(ranks: list[tuple[int, str]]) -> None:
    for status, output in ranks:
        assert status == 0 and "DONE" in output, output[-3000:]


REDUCE = """
import os, time, torch, torch.distributed as dist
import adasum_hvd.torch as hvd
from adasum_hvd import reference

def check(hosts):
    mine = [torch.arange(1.0, 6.0) * 3.0**k - k for k in range(hvd.size())]
    found = hvd.allreduce(mine[hvd.rank()], op=hvd.Adasum)
    expected = reference.adasum([tensor.numpy() for tensor in mine], hosts)
    assert torch.equal(found, torch.from_numpy(expected).float()), (found, expected)
"""
AGAIN = """
hvd.init()
assert (hvd.rank(), hvd.size()) == (int(os.environ["RANK"]), 3)
assert hvd.local_rank() == int(os.environ["LOCAL_RANK"])
check(HOSTS)
for _ in range(2):
    hvd.shutdown()
    hvd.init(process_sets=[hvd.ProcessSet([0, 2])])  # they meet in the rendezvous server, too
    check(HOSTS)
dist.init_process_group("gloo")  # by the same MASTER_PORT
ranks = [None] * 3
dist.all_gather_object(ranks, hvd.rank())
assert ranks == [0, 1, 2]
dist.destroy_process_group()
hvd.shutdown()
if hvd_rank := int(os.environ["RANK"]):
    time.sleep(hvd_rank)  # rank 0, with the servers, ends first
print("DONE", flush=True)
"""


def test_torchrun(tmp_path: Path) -> None:
    script = write(tmp_path, REDUCE + AGAIN.replace("HOSTS", '["a"] * 3'))
    words = [*torchrun(), "--nproc-per-node", "3", "--master-port", str(free_port())]
    words += ["--no-python", *python(), script]
    status, output = run_launcher(words, environment(), SECONDS)
    assert status == 0 and output.count("DONE") == 3, output[-3000:]


def test_uneven_hosts(tmp_path: Path) -> None:
    """One rank on the first host and two on the second; rank 0 holds the store itself."""
    script = write(tmp_path, REDUCE + AGAIN.replace("HOSTS", '["a", "b", "b"]'))
    places = [(0, 0, 1), (1, 0, 2), (1, 1, 2)]
    check_done(
        start_each(
            [*python(), script],
            [
                {
                    "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
                    "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": "2",
                    "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(here),
                }
                for rank, (host, local, here) in enumerate(places)
            ],
        )
    )  # fmt: skip


PLAIN = """
import os, sys, torch
import horovod.torch as hvd
for _ in range(3):
    hvd.init()
    assert hvd.size() == int(sys.argv[1]) == int(os.environ["HOROVOD_LOCAL_SIZE"])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.shutdown()
os.write(1, b"DONE %d\\n" % os.getsid(0))  # in one piece: other ranks write, too
"""


def test_exec_starts_ranks_of_plain_horovod_in_one_session(tmp_path: Path) -> None:
    # Not forks, which are in the sessions of their parents.
    words = [*EXEC, "--nprocs", "3", "--", sys.executable, write(tmp_path, PLAIN), "3"]
    status, output = run_launcher(words, environment(), SECONDS)
    done = [line for line in output.splitlines() if line.startswith("DONE")]
    assert status == 0 and len(done) == 3 and len(set(done)) == 1, output[-3000:]


FAILING = """
import os, signal, sys, time
rank = os.environ["HOROVOD_RANK"]
if rank == "0" and len(sys.argv) > 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"BEGUN\\n")  # in one piece, too
time.sleep(1 if rank == "1" else 600)
END
"""


@pytest.mark.parametrize(
    ("end", "deaf", "expected"),
    [
        ("sys.exit(7)", [], 7),
        # Those too that do not want to.
        ("os.kill(os.getpid(), signal.SIGKILL)", ["deaf"], 137),
    ],
)
def test_exec_ends_all_ranks_when_one_fails(
    tmp_path: Path, end: str, deaf: list[str], expected: int
) -> None:
    script = write(tmp_path, FAILING.replace("END", end))
    words = [*EXEC, "--nprocs", "3", "--", sys.executable, script, *deaf]
    status, output = run_launcher(words, environment(), SECONDS)
    assert status == expected and output.count("BEGUN") == 3, (status, output[-3000:])


def test_ranks_end_with_exec_whatever_ends_it(tmp_path: Path) -> None:
    script = write(tmp_path, FAILING.replace("END", "time.sleep(600)"))
    words = [*EXEC, "--nprocs", "2", "--", sys.executable, script]
    launcher = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(2)] == [b"BEGUN\n"] * 2
    launcher.kill()
    launcher.communicate(timeout=SECONDS)  # until nobody is left who could write


@pytest.mark.parametrize("ranks", [[], ["--nprocs", "2"]])
def test_exec_of_what_is_no_program(ranks: list[str]) -> None:
    words = [*EXEC, *ranks, "--", "no-such-program"]
    status, output = run_launcher(words, environment(), SECONDS)
    assert status == 1 and "No such file or directory: 'no-such-program'" in output


def slurm(rank: int, ranks: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(ranks), "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip


def test_exec_as_a_rank_of_slurms(tmp_path: Path) -> None:
    words = [*EXEC, "--", *python(), write(tmp_path, PLAIN), "2"]
    check_done(start_each(words, [slurm(rank, 2) for rank in range(2)]))


TENSORFLOW = """
import tensorflow as tf
import adasum_hvd.tensorflow as hvd
hvd.init()
assert hvd.size() == 2
found = hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Adasum)
assert found.numpy().tolist() == [1.0, 2.0]
print("DONE")
"""


def test_tensorflow(tmp_path: Path) -> None:
    words = [*python("tensorflow"), write(tmp_path, TENSORFLOW)]
    check_done(start_each(words, [slurm(rank, 2) for rank in range(2)]))


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    """The ranks that have started name the missing one."""
    short = {"HOROVOD_START_TIMEOUT": "3"}
    words = [*EXEC, "--", sys.executable, "-c", "print('DONE')"]
    for status, output in start_each(words, [slurm(0, 3) | short, slurm(2, 3) | short]):
        assert status == 1 and "DONE" not in output
        assert "Slurm: expected 3 ranks" in output, output
        assert "HOROVOD_START_TIMEOUT" in output


def pmi(rank: int) -> dict[str, str]:
    """Return the variables of MPICH's mpiexec, which Open MPI does not read."""
    own = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MASTER_PORT": ""}
    return own | {"MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}


# Of the proxy, which srun has started: one task on each node.
STEP = slurm(0, 1) | {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize("outer", [{}, STEP])
def test_open_mpi_under_another_mpi_launcher(
    tmp_path: Path, outer: dict[str, str]
) -> None:
    script = write(tmp_path, REDUCE + "hvd.init()\ncheck(['a'] * 2)\nprint('DONE')")
    check_done(
        start_each([*python(), script], [outer | pmi(rank) for rank in range(2)])
    )


@pytest.mark.skipif(not shutil.which("mpiexec.hydra"), reason="required MPICH")
def test_two_jobs_of_mpichs_mpiexec_at_once(tmp_path: Path) -> None:
    script = write(tmp_path, REDUCE + "hvd.init()\ncheck(['a'] * 2)\nprint('DONE')")
    # Not a fork of the harness, which has no process of mpiexec's above it.
    words = ["mpiexec.hydra", "-n", "2", sys.executable, script]
    ranks = start_each(words, [{"MASTER_PORT": ""}] * 2)
    for status, output in ranks:
        assert status == 0 and output.count("DONE") == 2, output[-3000:]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "{}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        {
            "PMIX_RANK": "0"
        },  # PMIx does not tell the size, so every rank must ask for it
    ],
)
def test_mpi_that_finds_one_rank_of_several(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    script = write(
        tmp_path, "import adasum_hvd.torch as hvd\nhvd.init()\nprint('DONE')"
    )
    ranks = [
        {name: value.format(rank) for name, value in variables.items()}
        | {"HOROVOD_CONTROLLER": "mpi"}
        for rank in range(2)
    ]
    for status, output in start_each([*python(), script], ranks):
        assert status == 1 and "DONE" not in output
        assert "1: the MPI of this Horovod does not work with this launcher" in output
        assert "export HOROVOD_CONTROLLER=gloo" in output


@pytest.mark.parametrize("words", [[], [*EXEC, "--"]])
def test_one_process_over_gloo(tmp_path: Path, words: list[str]) -> None:
    script = write(
        tmp_path, PLAIN if words else "import adasum_hvd.torch as h; h.init()"
    )
    variables = environment((("HOROVOD_CONTROLLER", "gloo"),))
    status, output = run_launcher([*words, *python(), script, "1"], variables, SECONDS)
    assert status == 0, output[-3000:]


def test_exec_starts_ranks_although_a_controller_is_chosen(tmp_path: Path) -> None:
    words = [*EXEC, "--nprocs", "2", "--", *python(), write(tmp_path, PLAIN), "2"]
    variables = environment((("HOROVOD_CONTROLLER", "mpi"),))
    status, output = run_launcher(words, variables, SECONDS)
    assert status == 0 and output.count("DONE") == 2, output[-3000:]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "got no WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"HOROVOD_RANK": "0"}, "remove --nprocs"),
    ],
)
def test_exec_refuses(variables: dict[str, str], words: str) -> None:
    variables = {**os.environ, **variables}
    variables.pop("MASTER_PORT", None)
    command = [*EXEC, "--nprocs", "2", "--", "true"]
    status, output = run_launcher(command, variables, SECONDS)
    assert status == 1 and words in output, output
