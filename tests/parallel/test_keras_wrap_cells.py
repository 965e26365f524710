"""The Keras wrap cells."""

from __future__ import annotations

import pytest
from launch import Configuration, case_names

CONFIGURATIONS = [
    Configuration("cases_keras_wrap_cells", "gloo", 2),
    Configuration("cases_keras_strict_cells", "gloo", 4),
]


@pytest.mark.parametrize(
    ("configuration", "name"),
    [(c, name) for c in CONFIGURATIONS for name in case_names(c.cases)],
    ids=str,
)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)
