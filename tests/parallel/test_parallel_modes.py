"""Parallel modes and partly replicated parameters, on real ranks of both kinds of groups."""

from __future__ import annotations

import pytest
from launch import Configuration, case_names

CASES = "cases_parallel_modes"
CONFIGURATIONS = [Configuration(CASES, "gloo", ranks) for ranks in (2, 4)]


@pytest.mark.parametrize("name", case_names(CASES))
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)
