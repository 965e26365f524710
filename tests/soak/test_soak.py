"""`make soak`: what takes minutes. 10,000 random rounds over all transports, more ranks."""

from __future__ import annotations

import pytest

from tests.parallel import test_tensorflow, test_torch
from tests.parallel.harness.launch import Configuration, case_names, launch

PATIENT = (
    "ADASUM_CASE_SECONDS",
    "1400",
)  # many rounds, or many ranks on few processors


@pytest.mark.parametrize("local", ["auto", "staged", "off"])
@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 3), ("gloo", 4), ("mpi", 3)])
def test_random_reductions(backend: str, ranks: int, local: str) -> None:
    environment = (("ADASUM_HVD_LOCAL", local), PATIENT)
    outcome = launch(Configuration("torch.test_soak", backend, ranks, environment))
    outcome.check("case_random_reductions", ranks)
    print(outcome.results("case_random_reductions"))


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(test_torch.OPTIMIZER, "gloo", 4),
        Configuration(test_torch.OFFLOAD, "gloo", 3),
        Configuration(test_torch.MODES, "gloo", 4),
        Configuration(
            f"{test_tensorflow.OPTIMIZER}+{test_tensorflow.AGREEMENT}", "gloo", 3
        ),
        Configuration(test_torch.OPS, "gloo", 4),
        Configuration(test_torch.OPS, "gloo", 5, test_torch.NETWORK),
        Configuration(test_torch.OPS, "mpi", 8),
        Configuration("torch.test_convergence", "gloo", 8, (PATIENT,)),
        Configuration("torch.test_sixteen", "mpi", 16, (PATIENT,)),  # MindSpore's least
    ],
    ids=str,
)
def test_more_ranks(configuration: Configuration) -> None:
    outcome = launch(configuration)
    for name in case_names(configuration.cases):
        outcome.raise_failures(name, configuration.ranks)
