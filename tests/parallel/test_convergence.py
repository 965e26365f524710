"""The convergence study's simulation against real jobs of 4 and 8 processes."""

from __future__ import annotations

import pytest
from launch import Configuration

CASES = "cases_convergence"


@pytest.mark.parametrize("ranks", [4, 8])
def test_simulation_is_the_job(outcome_of, ranks: int) -> None:
    outcome_of(Configuration(CASES, "gloo", ranks)).check(
        "case_simulation_is_the_job", ranks
    )
