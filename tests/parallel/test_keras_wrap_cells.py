"""The Keras wrap cells."""

from __future__ import annotations

import pytest
from launch import Configuration, case_names

CONFIGURATION = Configuration("cases_keras_wrap_cells", "gloo", 2)


@pytest.mark.parametrize("name", case_names(CONFIGURATION.cases))
def test_case(outcome_of, name: str) -> None:
    outcome_of(CONFIGURATION).check(name, CONFIGURATION.ranks)
