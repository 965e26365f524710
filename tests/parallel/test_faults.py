"""Whatever happens to one rank, the others learn of it in time, and of which rank; the job ends.

The whole table is in tests/soak/test_faults.py; here is a row of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.parallel.harness.background import started
from tests.parallel.harness.faults import FIRST, Consequence, Fault, check, run

CHOSEN = [
    Fault("MPI", "stop", FIRST),
    Fault("Gloo", "missing", FIRST, sets=True),
    Fault("shared memory, Gloo", "stop", "exchange", exits=True),
    Fault("shared memory, MPI", "stop", "exchange", exits=True),
    Fault("Gloo", "missing", "negotiation"),
    Fault("MPI", "missing", "negotiation"),
    Fault("Gloo", "stop", "negotiation"),
    Fault("MPI", "stop", "negotiation"),
    Fault("Gloo", "stop", "exchange"),
    Fault("MPI", "stop", "gather"),
    Fault("shared memory, MPI", "stop", "negotiation"),
    Fault("shared memory, Gloo", "stop", "exchange"),
    Fault("shared memory, Gloo", "memory", "exchange"),
    Fault("Gloo", "memory", "exchange"),
    Fault("Gloo", "raise", "negotiation"),
    Fault("Gloo", "kill", "gather"),
    Fault("MPI", "kill", "exchange"),
    Fault("Gloo", "kill", "exchange", sets=True),
    Fault("shared memory, Gloo", "memory", "exchange", sets=True),
    Fault("MPI", "memory", "exchange", sets=True),
    Fault("shared memory, MPI", "pause", "exchange", sets=True),
    Fault("Gloo", "pause", "exchange"),
    Fault("shared memory, Gloo", "missing", "negotiation", sets=True),
]


@pytest.fixture(scope="module")
def consequences(
    request: pytest.FixtureRequest,
) -> Iterator[dict[str, Future[Consequence]]]:
    """Start the faults of the selected tests, by the tests' names."""
    yield from started(request, {test_the_others_know.__name__: run}, 3)


@pytest.mark.parametrize("fault", CHOSEN, ids=str)
def test_the_others_know(
    consequences: dict[str, Future[Consequence]],
    request: pytest.FixtureRequest,
    fault: Fault,
) -> None:
    check(fault, consequences[request.node.name].result())
