"""A rank of the engine on torch.distributed that dies or stops ends the others in bounded time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parallel.harness.launch import REPOSITORY, environment

RANKS, TIMEOUT_SECONDS = 3, 6
PROGRAM = "tests.parallel.programs.distributed_fault_job"


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_the_others_end_within_the_groups_timeout(tmp_path: Path, fault: str) -> None:
    words = [str(RANKS), str(tmp_path / "store"), fault, str(TIMEOUT_SECONDS)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(rank), *words],
            env=environment(),
            cwd=REPOSITORY,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS)
    ]
    try:
        began = time.monotonic()
        for rank in ranks[:-1]:
            output, _ = rank.communicate(timeout=90)
            assert rank.returncode == 1, (rank.returncode, output)
            assert "step 3 after" in output, output
            waited = float(output.split("step 3 after ")[1].split(" s")[0])
            assert waited <= TIMEOUT_SECONDS + 3, output
        print(f"{fault}: all ended after {time.monotonic() - began:.1f} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
