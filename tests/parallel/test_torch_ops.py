"""AdaSum of torch tensors on Gloo and MPI, at every rank count, and the same bits everywhere."""

from __future__ import annotations

import pytest
from launch import Configuration, Outcome, case_names

CASES = "cases_torch_ops"
# Every path that large tensors would take, on small ones: 1 KB MPI messages, 1 block chunks.
TINY = (
    ("ADASUM_HVD_CHUNK_BYTES", "1"),
    ("ADASUM_HVD_MAX_MESSAGE_BYTES", "1024"),
    ("ADASUM_HVD_REPLICATE_BYTES", "0"),
)
PORTABLE = (("ADASUM_HVD_KERNELS", "portable"), ("ADASUM_HVD_REPLICATE_BYTES", "0"))
NETWORK = (("ADASUM_HVD_LOCAL", "off"),)  # as between hosts; else shared memory
STAGED = (("ADASUM_HVD_LOCAL", "staged"), ("ADASUM_HVD_LOCAL_RING_BYTES", "4096"))
THREADS = (("ADASUM_HVD_NUM_THREADS", "3"),)  # else one, where ranks share processors
PLAIN = [
    *(Configuration(CASES, "gloo", ranks) for ranks in (1, 2)),
    Configuration(CASES, "gloo", 3, NETWORK),
    Configuration(CASES, "gloo", 4),
    Configuration(CASES, "gloo", 5, NETWORK),
    Configuration(CASES, "mpi", 8),
    Configuration(CASES, "mpi", 2, NETWORK),
    Configuration(CASES, "mpi", 3),
    Configuration(CASES, "mpi", 4, NETWORK),
]
TWO_HOSTS = Configuration(CASES, "gloo", 4, hosts="localhost:2,127.0.0.1:2")
SPLIT = (("ADASUM_HVD_RADICES", "2x2"), ("ADASUM_HVD_GROUP_SIZE", "2"))
SPECIAL = [
    Configuration(CASES, "mpi", 3, TINY + NETWORK),
    Configuration(CASES, "gloo", 4, PORTABLE),
    Configuration(CASES, "gloo", 3, TINY + STAGED + THREADS),
    Configuration(CASES, "gloo", 3, hosts="localhost:1,127.0.0.1:2"),
    TWO_HOSTS,
    Configuration(CASES, "mpi", 4, TINY + SPLIT),
    Configuration(
        CASES,
        "gloo",
        4,
        (("ADASUM_HVD_GROUP_OP", "average"), ("ADASUM_HVD_GROUP_SIZE", "2")),
    ),
]


@pytest.mark.parametrize("name", case_names(CASES))
@pytest.mark.parametrize("configuration", PLAIN + SPECIAL, ids=str)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    skip_groups = "GROUP_OP" in str(configuration.environment) and name in (
        "case_properties",  # orthogonal inputs add up: not where groups are averaged
        "case_cancelling_pairs",
    )
    if skip_groups:
        pytest.skip("a property of AdaSum all the way down")
    outcome_of(configuration).check(name, configuration.ranks)


def test_a_case_with_nothing_to_check_is_skipped(outcome_of) -> None:
    with pytest.raises(pytest.skip.Exception, match="needs 2 ranks"):
        outcome_of(PLAIN[0]).check("case_process_set", 1)


def test_a_case_is_skipped_by_all_ranks_or_by_none() -> None:
    verdicts = [{"error": "", "skipped": why} for why in ("", "needs more", "")]
    outcome = Outcome({"case_a": dict(enumerate(verdicts))})
    with pytest.raises(AssertionError, match=r"skipped on some ranks only.*needs more"):
        outcome.check("case_a", 3)
    outcome.verdicts["case_a"][1]["skipped"] = ""
    outcome.check("case_a", 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN[1], PLAIN[6]),
        (PLAIN[2], PLAIN[7]),
        (PLAIN[3], PLAIN[8]),
        (PLAIN[2], SPECIAL[0]),
        (PLAIN[3], SPECIAL[1]),
        (PLAIN[2], SPECIAL[2]),
    ],
    ids=lambda configuration: str(configuration),
)
def test_same_bits(outcome_of, one: Configuration, other: Configuration) -> None:
    case = "case_every_dtype_and_size"
    mine, theirs = (outcome_of(c).results(case)[0] for c in (one, other))
    assert len(mine) == 4
    assert mine == theirs


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (TWO_HOSTS, "levels of 2 x 2 ranks; inside a host shared memory"),
        (PLAIN[3], "shared memory"),
        (PLAIN[2], "network (ADASUM_HVD_LOCAL=off)"),
        (SPECIAL[3], "network"),  # hosts of one and of two ranks
    ],
    ids=str,
)
def test_ranks_know_their_path(
    outcome_of, configuration: Configuration, words: str
) -> None:
    paths = outcome_of(configuration).results("case_path")
    assert len(paths) == configuration.ranks
    assert all(path.startswith(words) for path in paths.values()), paths
