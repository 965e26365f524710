"""The examples that train with other people's loops, as a user starts them: `make integrations`."""

from __future__ import annotations

import re
import sys

import pytest

from tests.parallel.harness.launch import (
    REPOSITORY,
    TORCHRUN,
    environment,
    run_launcher,
)

SECONDS = 300
ONE = 1  # connects the ranks; all gradients are in one of DDP's buckets
UNDER_TORCHRUN = [*TORCHRUN, "--standalone", "--nproc-per-node"]


def run(words: list[str], example: str, *arguments: str) -> str:
    """Run an example and return what it printed."""
    program = str(REPOSITORY / "examples" / example)
    status, output = run_launcher([*words, program, *arguments], environment(), SECONDS)
    assert status == 0, output[-3000:]
    return output


def check_trained(output: str, ranks: int, accuracy: float, reductions: int) -> None:
    """Check the two lines that these examples end with; they fail where replicas differ."""
    (found,) = re.findall(r"^(\d+) ranks, (\d+) reductions by AdaSum$", output, re.M)
    assert tuple(map(int, found)) == (ranks, reductions), output[-3000:]
    (reached,) = re.findall(
        r"^(?:test accuracy|sums that are right:) (\S+)$", output, re.M
    )
    assert float(reached) >= accuracy, output[-3000:]


@pytest.mark.parametrize("op", ["average", "adasum-grad", "adasum-delta"])
def test_plain_ddp(op: str) -> None:
    output = run([*UNDER_TORCHRUN, "3"], "torch_ddp.py", "--op", op)
    assert "3 ranks, identical replicas" in output
    assert ("adasum-grad (gradient variant); 3 ranks" in output) is (
        op == "adasum-grad"
    )
    (accuracy,) = re.findall(r"^test accuracy (\S+)$", output, re.M)
    assert float(accuracy) > 0.95


def test_lightning() -> None:
    pytest.importorskip("lightning")
    output = run([sys.executable], "lightning_digits.py", "--devices", "2")
    check_trained(output, ranks=2, accuracy=0.85, reductions=ONE + 6 * 22)


def test_fabric() -> None:
    pytest.importorskip("lightning")
    output = run([*UNDER_TORCHRUN, "2"], "lightning_fabric.py", "--devices", "2")
    check_trained(output, ranks=2, accuracy=0.85, reductions=ONE + 6 * 22)


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    output = run([*UNDER_TORCHRUN, "2"], "accelerate_digits.py")
    # Of two passes the first one stays local.
    check_trained(output, ranks=2, accuracy=0.85, reductions=ONE + 6 * 22)


def test_transformers() -> None:
    pytest.importorskip("transformers")
    output = run([*UNDER_TORCHRUN, "2"], "transformers_trainer.py")
    check_trained(output, ranks=2, accuracy=0.7, reductions=ONE + 40 * 5)


def test_ray_train() -> None:
    pytest.importorskip("ray.train")
    output = run([sys.executable], "ray_train.py", "--workers", "2")
    # Ray starts a run again if its workers were slow to come.
    ((ranks, accuracy),) = set(re.findall(r"(\d+) ranks, test accuracy (\S+)", output))
    assert ranks == "2" and float(accuracy) > 0.9, output[-3000:]
