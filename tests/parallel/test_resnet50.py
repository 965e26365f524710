"""The ResNet-50 tutorial's command line; its parts are cases/torch/test_tutorial.py."""

from __future__ import annotations

from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import (
    REPOSITORY,
    command,
    environment,
    run_launcher,
)


def test_tutorial_command_line(tmp_path):
    program = str(REPOSITORY / "examples/resnet50_imagenet.py")
    log = tmp_path / "log.jsonl"
    words = [*command("gloo", 2), *python(), program, "--data", "synthetic"]
    words += ["--batch-size", "64", "--epochs", "2", "--epoch-log", str(log)]
    words += ["--checkpoint", str(tmp_path / "checkpoints")]
    # 2 ranks are one group of eight: no AdaSum, and a warning.
    status, output = run_launcher(words, environment(), 100)
    assert status == 0, output[-2000:]
    assert "all 2 ranks (group_size=8), which is reduced by average" in output
    assert "epoch: 2 step: 10 loss is " in output
    assert len(log.read_text().splitlines()) == 2
    status, output = run_launcher(words, environment(), 100)
    assert status == 0 and "resumed after step 20" in output, output[-2000:]


def test_tutorial_help():
    program = str(REPOSITORY / "examples/resnet50_imagenet.py")
    status, output = run_launcher([*python(), program, "--help"], environment(), 60)
    assert status == 0
    assert "--boost-config JSON" in output
