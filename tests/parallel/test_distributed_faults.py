"""A rank of the engine on torch.distributed that dies: the others end, and torchrun restarts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import (
    REPOSITORY,
    TORCHRUN,
    environment,
    run_launcher,
    torchrun,
)

TIMEOUT_SECONDS = 6
# Else restarted ranks read addresses of those before them: github.com/pytorch/pytorch/issues/135712
NEW_STORE = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
PROGRAM = "tests.parallel.programs.distributed_fault_job"


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("form", ["0011", "000"])  # hosts by rank
def test_the_others_end_within_the_groups_timeout(
    tmp_path: Path, form: str, fault: str
) -> None:
    words = [str(len(form)), str(tmp_path / "store"), fault, str(TIMEOUT_SECONDS)]
    ranks = [
        subprocess.Popen(
            [*python(), "-m", PROGRAM, str(rank), *words],
            env=environment((("ADASUM_HVD_HOSTNAME", host),)),
            cwd=REPOSITORY,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, host in enumerate(form)
    ]
    try:
        began = time.monotonic()
        for rank in ranks[:-1]:
            output, _ = rank.communicate(timeout=90)
            assert rank.returncode == 1, (rank.returncode, output)
            assert "step 3 after" in output, output
            waited = float(output.split("step 3 after ")[1].split(" s")[0])
            # A stopped rank is late; one that has ended has closed its connections.
            most = TIMEOUT_SECONDS + 3 if fault == "SIGSTOP" else TIMEOUT_SECONDS / 2
            assert waited <= most, output
        print(f"{fault}: all ended after {time.monotonic() - began:.1f} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def worker_of(torchrun: int, rank: int) -> int:
    """Return the process of a rank that torchrun has started."""
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"expected a worker of rank {rank} under process {torchrun}")


def test_torchrun_restarts_a_job_and_the_result_is_the_same(tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "1"]
    words += ["--no-python", *python()]
    words += [str(REPOSITORY / "examples" / "torch_restarts.py"), "--checkpoint"]
    expected, actual = tmp_path / "expected.pt", tmp_path / "actual.pt"
    first = [*torchrun(), *words, str(expected)]
    status, output = run_launcher(first, environment(), 120)
    assert status == 0 and "resumes" not in output, output

    log = tmp_path / "log"
    job = subprocess.Popen(
        [*TORCHRUN, *words, str(actual)],  # whose workers are its children
        env=environment(NEW_STORE),
        cwd=REPOSITORY,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        ends = time.monotonic() + 90
        while "epoch 2\n" not in log.read_text():
            assert job.poll() is None and time.monotonic() < ends, log.read_text()
            time.sleep(0.01)
        os.kill(worker_of(job.pid, 1), signal.SIGKILL)
        assert job.wait(timeout=90) == 0, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    (resumed,) = re.findall(r"^resumes after (\d) epochs$", log.read_text(), re.M)
    assert int(resumed) in (2, 3)  # the kill may come as the epoch ends
    torch.testing.assert_close(torch.load(actual), torch.load(expected), rtol=0, atol=0)
