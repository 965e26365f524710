"""The torch gradient reducer, replica check, banner and what travels beside, on Gloo and MPI."""

from __future__ import annotations

import pytest
from launch import Configuration, case_names

CASES = "cases_torch_tools+cases_torch_functions"
CONFIGURATIONS = [
    *(Configuration(CASES, "gloo", ranks) for ranks in (1, 2, 3)),
    Configuration(CASES, "mpi", 2),
]


@pytest.mark.parametrize("name", case_names(CASES))
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)
