"""TensorFlow and Keras on Gloo and MPI: one launch per configuration, for it starts slowly."""

from __future__ import annotations

import json
import sys

import pytest
from launch import (
    REPOSITORY,
    Configuration,
    case_names,
    command,
    environment,
    run_launcher,
)

TENSORS = "cases_tensorflow_ops+cases_tensorflow_reducer+cases_tensorflow_legacy"
NUMBERS = f"{TENSORS}+cases_keras_optimizer"
KERAS = "cases_keras_modes+cases_keras_scales+cases_keras_callbacks"
CONFIGURATIONS = [
    Configuration(f"{NUMBERS}+{KERAS}", "gloo", 2),
    Configuration(TENSORS, "gloo", 3),  # all of it in make soak
    Configuration(NUMBERS, "mpi", 2),
]
AGREEMENT = Configuration(
    "cases_keras_agreement+cases_tensorflow_arguments+cases_keras_missing", "gloo", 3
)
# The launches of test_torch_ops.py; its 3 ranks use Gloo's messages, ours shared memory.
TORCH = {
    2: Configuration("cases_torch_ops", "gloo", 2),
    3: Configuration("cases_torch_ops", "gloo", 3, (("ADASUM_HVD_LOCAL", "off"),)),
}
CASES = [
    pytest.param(configuration, name, id=f"{configuration}-{name}")
    for configuration in [*CONFIGURATIONS, AGREEMENT]
    for name in case_names(configuration.cases)
]


@pytest.mark.parametrize(("configuration", "name"), CASES)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_same_bits_as_torch(outcome_of, configuration: Configuration) -> None:
    ours = outcome_of(configuration).results("case_every_dtype_and_size")
    torchs = outcome_of(TORCH[configuration.ranks]).results("case_bits_for_tensorflow")
    assert len({str(result) for result in ours.values()}) == 1
    assert ours[0] == torchs[0]
    assert len(ours[0]) == 3


def test_keras_example(tmp_path) -> None:
    example = str(REPOSITORY / "examples/keras_digits.py")
    words = [*command("gloo", 2), sys.executable, example]
    words += ["--op", "adasum-delta", "--epochs", "2", "--output", str(tmp_path)]
    status, output = run_launcher(words, environment(), 150)
    assert status == 0, output[-3000:]
    result = json.loads((tmp_path / "keras_digits.json").read_text())
    assert result["identical"]
    assert result["accuracy"] > 0.6
    assert (tmp_path / "keras_digits.keras").exists()


def test_custom_loop_example() -> None:
    example = str(REPOSITORY / "examples/tensorflow2_custom_loop.py")
    words = [*command("gloo", 2), sys.executable, example, "--steps", "60"]
    status, output = run_launcher(
        [*words, "--op", "adasum-grad", "--tape"], environment(), 150
    )
    assert status == 0, output[-3000:]
    assert "replicas identical: True" in output
