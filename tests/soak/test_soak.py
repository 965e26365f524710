"""`make soak`: what takes minutes. 10,000 random rounds over all transports, more ranks."""

from __future__ import annotations

import pytest

from tests.parallel.harness import configurations as on
from tests.parallel.harness.configurations import Configuration
from tests.parallel.harness.job import Job

# Many rounds, or many ranks on few processors.
PATIENT = ("ADASUM_CASE_SECONDS", "1400")


@pytest.mark.parametrize("local", ["auto", "staged", "off"])
@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 3), ("gloo", 4), ("mpi", 3)])
def test_random_reductions(backend: str, ranks: int, local: str) -> None:
    environment = (("ADASUM_HVD_LOCAL", local), PATIENT)
    job = Job(Configuration(("torch.test_soak",), backend, ranks, environment))
    job.check("case_random_reductions")
    rounds = job.results("case_random_reductions")
    job.close()
    assert [of_rank["rounds"] > 0 for of_rank in rounds.values()] == [True] * ranks


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(on.OPTIMIZER, "gloo", 4),
        Configuration(on.OFFLOAD, "gloo", 3),
        Configuration(on.MODES, "gloo", 4),
        Configuration((*on.KERAS_OPTIMIZER, *on.AGREEMENT), "gloo", 3),
        Configuration(on.OPS, "gloo", 4),
        Configuration(on.OPS, "gloo", 5, on.NETWORK),
        Configuration(on.OPS, "mpi", 8),
        Configuration(on.DISTRIBUTED, "torchrun", 4),
        Configuration(on.SHARDED, "torchrun", 6),
        Configuration(
            on.LAYOUTS, "torchrun", 8
        ),  # two shards next to two of another kind
        Configuration(on.CONVERGENCE, "gloo", 8, (PATIENT,)),
        # MindSpore's cells need 16 ranks at least.
        Configuration(("torch.test_sixteen",), "mpi", 16, (PATIENT,)),
        Configuration(("torch.test_strict_sum",), "gloo", 16, (PATIENT,)),
    ],
    ids=str,
)
def test_more_ranks(configuration: Configuration) -> None:
    job = Job(configuration)
    reasons = {str(case): job.reason_to_skip(case) for case in job.cases}
    job.close()
    lacks_ranks = {name: why for name, why in reasons.items() if "ranks" in why}
    assert not lacks_ranks
    assert "" in reasons.values(), reasons
