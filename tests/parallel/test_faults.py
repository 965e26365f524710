"""Whatever happens to one rank, the others learn of it in time, and of which rank; the job ends.

The whole table is in tests/soak/test_faults.py; here is a row of each kind.
"""

from __future__ import annotations

import pytest
from faults import Fault, check, run

CHOSEN = [
    Fault("shared memory, Gloo", "memory", "exchange"),
    Fault("Gloo", "memory", "exchange"),
    Fault("Gloo", "raise", "negotiation"),
    Fault("Gloo", "kill", "gather"),
    Fault("Gloo", "missing", "negotiation"),
    Fault("MPI", "missing", "negotiation"),
]


@pytest.mark.parametrize("fault", CHOSEN, ids=str)
def test_the_others_know(fault: Fault) -> None:
    check(fault, run(fault))
