"""Results of cases compared between jobs: controllers, paths, engines, frameworks."""

from __future__ import annotations

import pytest

from tests.parallel.harness import configurations as on
from tests.parallel.harness.configurations import Configuration
from tests.parallel.harness.job import judge

EVERY_DTYPE = "case_every_dtype_and_size"


@pytest.mark.needs(EVERY_DTYPE)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (on.TWO_HOSTS, on.THEIR_HOSTS_4),
        (on.GLOO_2, on.MPI_2),
        (on.GLOO_3, on.MPI_3),
        (on.GLOO_4, on.MPI_4),
        (on.GLOO_3, on.TINY_MPI),
        (on.GLOO_4, on.PORTABLE_MPI),
        (on.GLOO_3, on.STAGED_MPI),
        (on.GLOO_2, on.IN_TURN_2),
        (on.GLOO_3, on.ON_HOST_3),
        (on.MPI_5, on.ON_HOST_5),
        (on.UNEQUAL_HOSTS, on.THEIR_HOSTS_3),
    ],
    ids=str,
)
def test_same_bits(job, one: Configuration, other: Configuration) -> None:
    mine, others = (job(c).results(EVERY_DTYPE)[0] for c in (one, other))
    assert len(mine) == 4
    assert mine == others


@pytest.mark.needs(EVERY_DTYPE, "case_bits_for_tensorflow")
@pytest.mark.parametrize(
    ("configuration", "torch"),
    [(on.TENSORFLOW_GLOO_2, on.GLOO_2), (on.TENSORFLOW_MPI_3, on.GLOO_3)],
    ids=str,
)
def test_tensorflow_has_the_bits_of_torch(job, configuration, torch) -> None:
    ours = job(configuration).results(EVERY_DTYPE)
    of_torch = job(torch).results("case_bits_for_tensorflow")
    assert len({str(result) for result in ours.values()}) == 1
    assert ours[0] == of_torch[0]
    assert len(ours[0]) == 3


@pytest.mark.needs("case_path")
@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (on.TWO_HOSTS, "levels of 2 x 2 ranks; inside a host shared memory"),
        (on.GLOO_4, "shared memory"),
        (on.GLOO_3, "network (ADASUM_HVD_LOCAL=off)"),
        (on.UNEQUAL_HOSTS, "inside a host shared memory"),
    ],
    ids=str,
)
def test_ranks_know_their_path(job, configuration: Configuration, words: str) -> None:
    paths = job(configuration).results("case_path")
    assert len(paths) == configuration.ranks
    assert all(path.startswith(words) for path in paths.values()), paths


@pytest.mark.needs("case_process_set")
@pytest.mark.parametrize("configuration", [on.ALONE], ids=str)
def test_a_case_with_nothing_to_check_is_skipped(job, configuration) -> None:
    with pytest.raises(pytest.skip.Exception, match="needs 2 ranks"):
        job(configuration).check("case_process_set")


def test_a_case_is_skipped_by_all_ranks_or_by_none() -> None:
    reasons = ["", "needs more", ""]
    verdicts = {r: {"error": "", "skipped": why} for r, why in enumerate(reasons)}
    with pytest.raises(AssertionError, match=r"skipped on some ranks only.*needs more"):
        judge(verdicts, 3)
    verdicts[1]["skipped"] = ""
    assert judge(verdicts, 3) == ""
