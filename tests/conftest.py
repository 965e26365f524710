"""Fixtures and options of the tests in all folders."""

from __future__ import annotations

import hypothesis
import pytest

# How long an example takes says something of this machine's other work only.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", help="quick or rest: tests/tiers.py", default="all")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if (tier := config.getoption("tier")) != "all":
        from tests.tiers import split  # which a wheel's tests are without

        items[:], others = split(items, tier)
        config.hook.pytest_deselected(items=others)
