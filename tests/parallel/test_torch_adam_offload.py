"""AdamOffload under DistributedOptimizer."""

from __future__ import annotations

import pytest
from launch import Configuration, case_names

CASES = "cases_adam_offload"
CONFIGURATIONS = [
    Configuration(CASES, "gloo", 1),
    Configuration(CASES, "gloo", 3),  # MPI in make soak
]


@pytest.mark.parametrize("name", case_names(CASES))
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)
