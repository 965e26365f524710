"""`make soak`: what takes minutes. Random reductions on every transport."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from launch import Configuration, launch


@pytest.mark.parametrize("local", ["direct", "staged", "off"])
@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 3), ("gloo", 4), ("mpi", 3)])
def test_random_reductions(backend: str, ranks: int, local: str) -> None:
    environment = (("ADASUM_HVD_LOCAL", local),)
    outcome = launch(Configuration("cases_soak", backend, ranks, environment))
    outcome.check("case_random_reductions", ranks)
