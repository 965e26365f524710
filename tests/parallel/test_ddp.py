"""AdaSum as DDP's communication hook: one launch of torchrun for 2 ranks and one for 3."""

from __future__ import annotations

from tests.parallel.harness.launch import Configuration, every_case

CONFIGURATIONS = [
    Configuration("distributed.test_ddp", "torchrun", ranks) for ranks in (2, 3)
]


@every_case(CONFIGURATIONS)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    outcome_of(configuration).check(name, configuration.ranks)
