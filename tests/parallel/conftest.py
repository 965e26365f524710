"""Jobs that tests share, and the order in which their cases are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parallel.harness.cases import Case
from tests.parallel.harness.configurations import CONFIGURATIONS, Configuration
from tests.parallel.harness.job import Job

JOBS = pytest.StashKey[dict[Configuration, Job]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[JOBS] = {}
    config.addinivalue_line(
        "markers",
        "needs(case): a case of the test's configurations whose results it reads",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the cases of a job together, in the order in which its ranks run them."""

    def place(item: pytest.Item) -> tuple[int, ...]:
        if not hasattr(item, "case"):
            return (len(CONFIGURATIONS),)
        files = item.configuration.files
        return CONFIGURATIONS.index(item.configuration), files.index(item.case.file)

    items.sort(key=place)


def _selected(items: list[pytest.Item], configuration: Configuration) -> list[Case]:
    """Return the cases of a configuration that the selected tests look at, in order."""
    chosen = {
        item.case
        for item in items
        if getattr(item, "configuration", None) == configuration
    }
    names = set()
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if configuration in parameters.values():
            names |= {name for mark in item.iter_markers("needs") for name in mark.args}
    return [c for c in configuration.cases if c in chosen or c.name in names]


def job_of(session: pytest.Session, configuration: Configuration) -> Job:
    """Return a configuration's job, which runs the cases of all selected tests."""
    jobs = session.config.stash[JOBS]
    if configuration not in jobs:
        for job in jobs.values():  # two at once would share the processors
            job.wait()
        jobs[configuration] = Job(
            configuration, _selected(session.items, configuration)
        )
    return jobs[configuration]


@pytest.fixture(scope="session")
def job(request: pytest.FixtureRequest) -> Iterator[Callable[[Configuration], Job]]:
    """Return a function from a configuration to its job."""
    return lambda configuration: job_of(request.session, configuration)


def pytest_sessionfinish(session: pytest.Session) -> None:
    for one in session.config.stash[JOBS].values():
        one.close()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how long the jobs took, which --durations counts in their first tests."""
    jobs = config.stash[JOBS]
    if jobs:
        terminalreporter.section("jobs, in seconds, with their slowest cases")
    for configuration, one in jobs.items():
        terminalreporter.write_line(
            f"{one.seconds:6.1f} {configuration}: {one.slowest(4)}"
        )
