"""Collects the files in these folders: one test per case and configuration that runs its file.

The files themselves are imported by the ranks only (harness/worker.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.conftest import job_of
from tests.parallel.harness.cases import Case, cases_in, file_of
from tests.parallel.harness.configurations import CONFIGURATIONS, Configuration


class CaseItem(pytest.Item):
    """A case on the ranks of a configuration."""

    def __init__(self, case: Case, configuration: Configuration, **more: Any):
        super().__init__(**more)
        self.case, self.configuration = case, configuration

    def runtest(self) -> None:
        job_of(self.session, self.configuration).check(self.case)

    def repr_failure(self, excinfo: pytest.ExceptionInfo) -> Any:
        """Show the ranks' tracebacks and not this process's."""
        if excinfo.errisinstance(AssertionError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.case.line - 1, self.name


class CaseFile(pytest.File):
    """A file of cases."""

    def collect(self) -> Iterator[CaseItem]:
        file = file_of(self.path)
        for configuration in CONFIGURATIONS:
            if file in configuration.files:
                for case in cases_in(file):
                    ids = "-".join(filter(None, (str(configuration), case.ids)))
                    yield CaseItem.from_parent(
                        self,
                        name=f"{case.function}[{ids}]",
                        case=case,
                        configuration=configuration,
                    )


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector:
    return CaseFile.from_parent(parent, path=module_path)
