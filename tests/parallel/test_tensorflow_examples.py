"""The examples of TensorFlow and Keras, on two ranks."""

from __future__ import annotations

import re

from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import (
    REPOSITORY,
    command,
    environment,
    run_launcher,
)


def test_keras_example(tmp_path) -> None:
    example = str(REPOSITORY / "examples/keras_digits.py")
    words = [*command("gloo", 2), *python("tensorflow"), example]
    words += ["--op", "adasum-delta", "--epochs", "2", "--output", str(tmp_path)]
    status, output = run_launcher(words, environment(), 150)
    assert status == 0, output[-3000:]
    (accuracy,) = re.findall(r"test accuracy (\S+);", output)
    assert float(accuracy) > 0.6
    assert (tmp_path / "keras_digits.keras").exists()


def test_custom_loop_example() -> None:
    example = str(REPOSITORY / "examples/tensorflow2_custom_loop.py")
    words = [*command("gloo", 2), *python("tensorflow"), example, "--steps", "60"]
    status, output = run_launcher(
        [*words, "--op", "adasum-grad", "--tape"], environment(), 150
    )
    assert status == 0, output[-3000:]
    assert "replicas are identical" in output
