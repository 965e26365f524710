"""What the tests of all folders share: where to import from, and launches."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "tests/parallel",
    "tests/native",
    "tests/compatibility",
    "benchmarks",
    "examples",
)
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

from launch import Configuration, Outcome, launch  # noqa: E402


@pytest.fixture(scope="session")
def outcome_of():
    """Return a function from a configuration to its outcome.

    Launches are shared: the first test of a configuration starts its ranks.
    """

    @functools.cache
    def get(configuration: Configuration) -> Outcome:
        return launch(configuration)

    return get
