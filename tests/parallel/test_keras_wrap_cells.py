"""The Keras wrap cells, where the Keras optimizer is there."""

from __future__ import annotations

import importlib.util

import pytest
from launch import Configuration, case_names

CONFIGURATION = Configuration("cases_keras_wrap_cells", "gloo", 2)
has_keras = importlib.util.find_spec("adasum_hvd.tensorflow.keras") is not None


@pytest.mark.skipif(not has_keras, reason="no adasum_hvd.tensorflow.keras")
@pytest.mark.parametrize("name", case_names(CONFIGURATION.cases))
def test_case(outcome_of, name: str) -> None:
    outcome_of(CONFIGURATION).check(name, CONFIGURATION.ranks)
