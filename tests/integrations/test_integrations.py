"""The examples that train with other people's loops, as a user starts them: `make integrations`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.parallel.harness.launch import (
    REPOSITORY,
    TORCHRUN,
    environment,
    run_launcher,
)

SECONDS = 300
UNDER_TORCHRUN = [*TORCHRUN, "--standalone", "--nproc-per-node"]


def run(words: list[str], example: str, *arguments: str) -> str:
    """Run an example and return what it printed."""
    program = str(REPOSITORY / "examples" / example)
    status, output = run_launcher([*words, program, *arguments], environment(), SECONDS)
    assert status == 0, output[-3000:]
    return output


def check_trained(output: str, ranks: int, accuracy: float, passes: int) -> None:
    """Check the two lines that these examples end with; they fail where replicas differ."""
    (found,) = re.findall(
        r"^(\d+) ranks, (\d+) passes reduced by AdaSum$", output, re.M
    )
    assert tuple(map(int, found)) == (ranks, passes), output[-3000:]
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
    check_trained(output, ranks=2, accuracy=0.85, passes=6 * 22)


def test_fabric() -> None:
    pytest.importorskip("lightning")
    output = run(
        [*UNDER_TORCHRUN, "2"],
        "lightning_fabric.py",
        "--devices",
        "2",
    )
    check_trained(output, ranks=2, accuracy=0.85, passes=6 * 22)


def test_lightning_with_fsdp2() -> None:
    pytest.importorskip("lightning")
    program = Path(__file__).with_name("lightning_fsdp2.py")
    words = [*UNDER_TORCHRUN, "4", str(program)]
    status, output = run_launcher(words, environment(), SECONDS)
    assert status == 0, output[-3000:]
    (found,) = re.findall(
        r"^4 ranks, (\d+) different weights, loss (\S+)$", output, re.M
    )
    assert found[0] == "1" and float(found[1]) < 0.8, found  # of 4 equal classes 1.39


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    output = run([*UNDER_TORCHRUN, "2"], "accelerate_digits.py")
    # Of two passes the first one stays local.
    check_trained(output, ranks=2, accuracy=0.85, passes=6 * 22)


def test_transformers() -> None:
    pytest.importorskip("transformers")
    output = run([*UNDER_TORCHRUN, "2"], "transformers_trainer.py")
    check_trained(output, ranks=2, accuracy=0.7, passes=40 * 5)


@pytest.mark.parametrize("workers", ["1", "2"])  # a single one has no DDP
def test_ray_train(workers: str) -> None:
    pytest.importorskip("ray.train")
    output = run([sys.executable], "ray_train.py", "--workers", workers)
    # Ray starts a run again if its workers were slow to come.
    ((ranks, accuracy),) = set(re.findall(r"(\d+) ranks, test accuracy (\S+)", output))
    assert ranks == workers and float(accuracy) > 0.9, output[-3000:]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ray_resumes(workers: str, tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    words = ["-m", "tests.integrations.trainings", "ray", str(tmp_path), workers]
    status, output = run_launcher([sys.executable, *words], environment(), SECONDS)
    assert status == 0, output[-3000:]
    found = re.findall(rf"{workers} workers, losses (\S+) (\S+)", output)
    (first, middle), (resumed, last) = dict.fromkeys(found)
    assert float(first) > float(resumed) > float(last), (found, middle)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("loop", "passes"),
    # Passes of all trainings in each rank; Lightning wraps a single process in DDP, too.
    [
        ("accelerate", {1: 0, 2: 24}),
        ("lightning", {1: 32, 2: 16}),
        ("transformers", {1: 0, 2: 12}),
    ],
)
def test_a_second_training(
    loop: str, passes: dict[int, int], ranks: int, tmp_path: Path
) -> None:
    pytest.importorskip(loop)
    starts = [sys.executable] if ranks == 1 else [*UNDER_TORCHRUN, str(ranks)]
    words = [*starts, "-m", "tests.integrations.trainings", loop, str(tmp_path)]
    status, output = run_launcher(words, environment(), SECONDS)
    assert status == 0, output[-3000:]
    (found,) = re.findall(
        r"^(\d) ranks, (\d+) passes, \d+ losses, falls: (\w+)$", output, re.M
    )
    assert found == (str(ranks), str(passes[ranks]), "True"), output[-3000:]


@pytest.mark.parametrize("ranks", [2, 4])  # 2 replicas of 1 and of 2 shards
def test_a_second_training_of_a_sharded_model(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    words = ["-m", "tests.integrations.trainings", "lightning_fsdp2", str(tmp_path)]
    starts = [*UNDER_TORCHRUN, str(ranks)]
    status, output = run_launcher([*starts, *words], environment(), SECONDS)
    assert status == 0, output[-3000:]
    found = re.findall(r"^(\d) ranks, (\d+) passes, .* falls: (\w+)$", output, re.M)
    # Of 8 epochs, the last 4 of which step on every second pass.
    assert found == [(str(ranks), str(6 * 32 // 4 // ranks), "True")], output[-3000:]


def test_what_modules_refuse() -> None:
    from adasum_hvd.integrations.accelerate import use_adasum

    with pytest.raises(TypeError, match=r"got 2 objects without one; pass what"):
        use_adasum("optimizer", "loader")
    pytest.importorskip("transformers")
    from adasum_hvd.integrations.transformers import AdasumCallback

    with pytest.raises(RuntimeError, match=r"by a Trainer of transformers, but got an"):
        AdasumCallback().on_train_begin()
