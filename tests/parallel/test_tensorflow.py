"""TensorFlow and Keras on Gloo and MPI: one launch per configuration, for it starts slowly."""

from __future__ import annotations

import re
import sys

import pytest

from tests.parallel import test_torch
from tests.parallel.harness.launch import (
    REPOSITORY,
    Configuration,
    command,
    environment,
    every_case,
    run_launcher,
)

OPS = "tensorflow.test_ops+tensorflow.test_reducer+tensorflow.test_legacy"
OPTIMIZER = "keras.test_optimizer"
MODES = "keras.test_modes+keras.test_scales+keras.test_callbacks+keras.test_elastic"
MONITOR = "keras.test_monitor"
CELLS = "keras.test_wrap_cells"
AGREEMENT = "keras.test_agreement+tensorflow.test_arguments+keras.test_missing"


def tensorflow(backend: str, ranks: int, *cases: str) -> Configuration:
    return Configuration("+".join((OPS, *cases)), backend, ranks, label="tensorflow")


GLOO_2 = tensorflow("gloo", 2, MODES, MONITOR, CELLS)
MPI_3 = tensorflow("mpi", 3, OPTIMIZER, MONITOR, AGREEMENT)  # both on Gloo in make soak
STRICT_CELLS = Configuration("keras.test_strict_cells", "gloo", 2)


@every_case([GLOO_2, MPI_3, STRICT_CELLS])
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)


@pytest.mark.needs("case_every_dtype_and_size", "case_bits_for_tensorflow")
@pytest.mark.parametrize(
    ("configuration", "torch"),
    [
        (GLOO_2, test_torch.GLOO_2),
        (MPI_3, test_torch.GLOO_3),
    ],
    ids=str,
)
def test_same_bits_as_torch(outcome_of, configuration, torch: Configuration) -> None:
    ours = outcome_of(configuration).results("case_every_dtype_and_size")
    torchs = outcome_of(torch).results("case_bits_for_tensorflow")
    assert len({str(result) for result in ours.values()}) == 1
    assert ours[0] == torchs[0]
    assert len(ours[0]) == 3


def test_keras_example(tmp_path) -> None:
    example = str(REPOSITORY / "examples/keras_digits.py")
    words = [*command("gloo", 2), sys.executable, example]
    words += ["--op", "adasum-delta", "--epochs", "2", "--output", str(tmp_path)]
    status, output = run_launcher(words, environment(), 150)
    assert status == 0, output[-3000:]
    (accuracy,) = re.findall(r"test accuracy (\S+);", output)
    assert float(accuracy) > 0.6
    assert (tmp_path / "keras_digits.keras").exists()


def test_custom_loop_example() -> None:
    example = str(REPOSITORY / "examples/tensorflow2_custom_loop.py")
    words = [*command("gloo", 2), sys.executable, example, "--steps", "60"]
    status, output = run_launcher(
        [*words, "--op", "adasum-grad", "--tape"], environment(), 150
    )
    assert status == 0, output[-3000:]
    assert "replicas are identical" in output
