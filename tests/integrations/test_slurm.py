"""A cluster of two nodes on this machine: real Slurm, where its daemons are installed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parallel.harness.launch import REPOSITORY, environment, run_launcher

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "sinfo")
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="required root, for Slurm's daemons"),
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)),
        reason="required Slurm; apt install slurmctld slurmd slurm-client",
    ),
]
# No munge: nobody else is on this cluster.
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 State=UNKNOWN
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host},two Default=YES State=UP
SlurmdParameters=config_overrides
"""
PROGRAM = """
import torch
import adasum_hvd.torch as hvd
hvd.init()
found = hvd.allreduce(torch.ones(5), op=hvd.Adasum)
assert torch.equal(found, torch.ones(5))
print(f"DONE {hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()}")
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start a cluster and return the environment in which srun finds it."""
    host = socket.gethostname().split(".")[0]
    for folder in ("state", f"spool-{host}", "spool-two"):
        (tmp_path / folder).mkdir()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=host, folder=tmp_path, port=port, first=port + 1, second=port + 2,
        )
    )  # fmt: skip
    variables = environment((("SLURM_CONF", str(configuration)),))
    words = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", n] for n in (host, "two"))]
    log = (tmp_path / "log").open("w")
    daemons = [
        subprocess.Popen(word, env=variables, stdout=log, stderr=log) for word in words
    ]
    try:
        _wait_until_idle(variables, tmp_path / "log")
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)
        log.close()


def _wait_until_idle(variables: dict[str, str], log: Path) -> None:
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        states = ["sinfo", "--noheader", "--format=%T %D"]
        done = subprocess.run(states, env=variables, capture_output=True, text=True)
        if done.stdout.strip() == "idle 2":
            return
        time.sleep(0.5)
    raise AssertionError(f"Slurm has not started: {done}\n{log.read_text()[-3000:]}")


def test_srun(slurm: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    host = socket.gethostname().split(".")[0]  # the node whose name has an address
    words = [
        "srun",
        "--nodelist",
        host,
        "--nodes",
        "1",
        "--ntasks",
        "3",
        "--overcommit",
    ]
    words += [sys.executable, str(program)]
    status, output = run_launcher(words, slurm, 240)
    assert status == 0, output[-3000:]
    for rank in range(3):
        assert f"DONE {rank} of 3, {rank} of 3" in output, output[-3000:]


def test_the_examples_script_is_accepted(slurm: dict[str, str]) -> None:
    script = REPOSITORY / "examples" / "slurm.sbatch"
    words = ["sbatch", "--test-only", str(script)]
    done = subprocess.run(words, env=slurm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"using 8 processors on nodes \S+,\S+", done.stderr), done.stderr
