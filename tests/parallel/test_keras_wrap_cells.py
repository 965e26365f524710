"""The Keras wrap cells."""

from __future__ import annotations

from launch import Configuration, every_case

CONFIGURATIONS = [
    Configuration("cases_keras_wrap_cells", "gloo", 2),
    Configuration("cases_keras_strict_cells", "gloo", 4),
]


@every_case(CONFIGURATIONS)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)
