"""AdaSum of TensorFlow tensors through Horovod's own functions."""

from __future__ import annotations

import pytest
from launch import Configuration, case_names

CASES = "cases_tensorflow_ops"
CONFIGURATIONS = [Configuration(CASES, "gloo", 2), Configuration(CASES, "mpi", 2)]
TORCH = Configuration("cases_torch_ops", "gloo", 2)


@pytest.mark.parametrize("name", case_names(CASES))
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_same_bits_as_torch(outcome_of, configuration: Configuration) -> None:
    ours = outcome_of(configuration).results("case_every_dtype_and_size")
    torchs = outcome_of(TORCH).results("case_bits_for_tensorflow")
    assert ours[0] == ours[1] == torchs[0]
    assert len(ours[0]) == 3
