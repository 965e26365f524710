"""Every benchmark runs to its end and prints figures; the figures themselves are not judged."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ALONE = {
    "adam_offload": "--millions 1 --repetitions 2 --slow-repetitions 1",
    "allreduce": "--ranks 2 --rounds 1 --repetitions 2 --cases '1 KB' '161 x 1 KB' ResNet-50",
    "commits": "HEAD --starts 1 --elements 100000",
    "cost_model": "",
    "ddp": "--ranks 2 --models small --repetitions 2",
    "ddp-alone": "--ranks 2 --models small --repetitions 2 --alone --launcher mpi",
    "exchange": "--ranks 2 --bytes 1 1000 --repetitions 20",
    "monitor": "--ranks 2 --repetitions 5",
    "optimizer": "--ranks 2 --models '1600 x 256' --repetitions 2",
    "quadratic": "",
    "tensorflow_step": "--ranks 2 --repetitions 1",
}
TORCHRUN = {
    "distributed": "--elements 100000 --repetitions 2",
    "sharded": "--width 64 --repetitions 2",
}


def _check(words: list[str], folder: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"\d\.\d", done.stdout), done.stdout


@pytest.mark.parametrize(("name", "words"), ALONE.items(), ids=list(ALONE))
def test_a_script_of_its_own(name: str, words: str, tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / f"{name.partition('-')[0]}.py"
    _check([sys.executable, str(script), *shlex.split(words)], tmp_path)


@pytest.mark.parametrize(("name", "words"), TORCHRUN.items(), ids=list(TORCHRUN))
def test_a_script_under_torchrun(name: str, words: str, tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    script = REPOSITORY / "benchmarks" / f"{name}.py"
    start = [str(torchrun), "--standalone", "--nproc-per-node", "4"]
    _check([*start, str(script), *shlex.split(words)], tmp_path)
