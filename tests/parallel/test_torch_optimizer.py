"""The torch DistributedOptimizer on Gloo and MPI."""

from __future__ import annotations

from launch import Configuration, every_case

CASES = "cases_torch_optimizer+cases_torch_delta"
CONFIGURATIONS = [
    *(Configuration(CASES, "gloo", ranks) for ranks in (1, 2, 3)),  # 4 in make soak
    Configuration(CASES, "mpi", 2),
    Configuration("cases_torch_drift+cases_torch_misuse", "gloo", 2),
]


@every_case(CONFIGURATIONS)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)
