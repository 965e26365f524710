"""Jobs that mostly wait, and so run next to one another and to other tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest

Result = TypeVar("Result")


def started(
    request: pytest.FixtureRequest,
    jobs: Mapping[str, Callable[..., Result]],
    at_once: int,
) -> Iterator[dict[str, Future[Result]]]:
    """Start the jobs of a file's selected tests, in their order; yield them by the tests' names.

    A fixture of a module yields from it. `jobs` has by a test function's name what is called with
    the test's parameters.
    """
    tests = [item for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(at_once) as pool:
        yield {
            test.name: pool.submit(
                jobs[test.originalname],
                **getattr(getattr(test, "callspec", None), "params", {}),
            )
            for test in tests
            if test.originalname in jobs
        }
