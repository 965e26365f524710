"""The examples that train with other people's loops, as a user starts them: `make integrations`."""

from __future__ import annotations

import re
import sys

import pytest
from launch import REPOSITORY, TORCHRUN, environment, run_launcher

SECONDS = 300
UNDER_TORCHRUN = [*TORCHRUN, "--standalone", "--nproc-per-node"]


def run(words: list[str], example: str, *arguments: str) -> str:
    """Run an example and return what it printed."""
    program = str(REPOSITORY / "examples" / example)
    status, output = run_launcher([*words, program, *arguments], environment(), SECONDS)
    assert status == 0, output[-3000:]
    return output


def check_trained(output: str, ranks: int, accuracy: float, reductions: int) -> None:
    """Check the line that these examples end with."""
    found = re.search(
        r": (\d+) ranks.* (\d+\.\d+|\d+%).*replicas identical: yes, (\d+) reductions",
        output,
    )
    assert found, output[-3000:]
    reached = found[2]
    value = float(reached[:-1]) / 100 if reached.endswith("%") else float(reached)
    assert int(found[1]) == ranks and value >= accuracy, found[0]
    # All gradients are in one of DDP's buckets; one more connects the ranks.
    assert int(found[3]) == reductions + 1


def test_plain_ddp() -> None:
    output = run([*UNDER_TORCHRUN, "3"], "torch_ddp.py")
    rows = re.findall(r"^(\S+) +(0\.\d+) +[\d.]+  (yes|NO)$", output, re.M)
    assert [row[0] for row in rows] == ["average", "adasum-grad", "adasum-delta"]
    assert all(same == "yes" for *_, same in rows)
    assert float(rows[1][1]) > 0.97


@pytest.mark.parametrize(
    ("launcher", "loop"),
    [([sys.executable], "trainer"), ([*UNDER_TORCHRUN, "2"], "fabric")],
)
def test_lightning(launcher: list[str], loop: str) -> None:
    pytest.importorskip("lightning")
    output = run(launcher, "lightning_digits.py", "--with", loop, "--devices", "2")
    check_trained(output, ranks=2, accuracy=0.85, reductions=6 * 22)


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    output = run([*UNDER_TORCHRUN, "2"], "accelerate_digits.py")
    # Of two passes the first one stays local.
    check_trained(output, ranks=2, accuracy=0.85, reductions=6 * 22)


def test_transformers() -> None:
    pytest.importorskip("transformers")
    output = run([*UNDER_TORCHRUN, "2"], "transformers_trainer.py")
    check_trained(output, ranks=2, accuracy=0.7, reductions=40 * 5)
