"""What the tests of all folders share: where to import from, and launches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "tests/native",
    "tests/unit",
    "tests/compatibility",
    "benchmarks",
    "examples",
    "docs",
)
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

from tests.parallel.harness.launch import Configuration, Outcome, launch  # noqa: E402

# How long an example takes says something of this machine's other work only.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

LAUNCHED: dict[Configuration, Outcome] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long the launches took, which --durations counts in their first tests."""
    if LAUNCHED:
        terminalreporter.section("launches, in seconds")
    for configuration, outcome in LAUNCHED.items():
        line = f"{outcome.seconds:6.1f} {configuration}: {outcome.slowest(4)}"
        terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(case): a case whose results the test looks at"
    )


def _selected(items: list[pytest.Item], configuration: Configuration) -> list[str]:
    """Return the cases that the selected tests of a configuration ask for."""
    names: dict[str, None] = {}
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if configuration in parameters.values():
            if "name" in parameters:
                names[parameters["name"]] = None
            names |= dict.fromkeys(
                case for mark in item.iter_markers("needs") for case in mark.args
            )
    return list(names)


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> Callable[[Configuration], Outcome]:
    """Return a function from a configuration to its outcome.

    Launches are shared: the first test of a configuration starts its ranks, which run the
    cases of all tests that were selected.
    """

    @functools.cache
    def get(configuration: Configuration) -> Outcome:
        only = _selected(request.session.items, configuration)
        outcome = LAUNCHED[configuration] = launch(configuration, only=only)
        return outcome

    return get
