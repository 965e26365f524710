"""The convergence study's simulation against real jobs of 4 and 8 processes."""

from __future__ import annotations

from launch import Configuration, every_case

CONFIGURATIONS = [Configuration("cases_convergence", "gloo", ranks) for ranks in (4, 8)]


@every_case(CONFIGURATIONS)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)
