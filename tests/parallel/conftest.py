"""Launches are shared: the first test of a configuration starts its ranks."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch import Configuration, Outcome, launch


@pytest.fixture(scope="session")
def outcome_of():
    """Return a function from a configuration to its (cached) outcome."""

    @functools.cache
    def get(configuration: Configuration) -> Outcome:
        return launch(configuration)

    return get
