"""All of PyTorch on Gloo and MPI: one launch per controller, ranks and environment."""

from __future__ import annotations

import pytest

from tests.parallel.harness.launch import Configuration, Outcome, every_case

OPS = "torch.test_ops+torch.test_fuzz"
OPTIMIZER = (
    "torch.test_optimizer+torch.test_buckets+torch.test_moved+torch.test_parameters"
    "+torch.test_scaler+torch.test_delta"
)
TOOLS = "torch.test_tools+torch.test_functions"
OFFLOAD = "torch.test_adam_offload"
MONITOR = "torch.test_monitor"
CELLS = "torch.test_wrap_cells"
MODES = "torch.test_parallel_modes"
DRIFT = "torch.test_drift+torch.test_weights+torch.test_misuse"

NETWORK = (("ADASUM_HVD_LOCAL", "off"),)  # as between hosts; else shared memory
# Every path that large tensors would take, on small ones: 1 KB MPI messages, 1 block chunks.
TINY = (
    ("ADASUM_HVD_CHUNK_BYTES", "1"),
    ("ADASUM_HVD_MAX_MESSAGE_BYTES", "1024"),
    ("ADASUM_HVD_REPLICATE_BYTES", "0"),
)
PORTABLE = (("ADASUM_HVD_KERNELS", "portable"), ("ADASUM_HVD_REPLICATE_BYTES", "0"))
STAGED = (("ADASUM_HVD_LOCAL", "staged"), ("ADASUM_HVD_LOCAL_RING_BYTES", "4096"))
THREADS = (("ADASUM_HVD_NUM_THREADS", "3"),)  # else one, where ranks share processors
SPLIT = (("ADASUM_HVD_RADICES", "2x2"), ("ADASUM_HVD_GROUP_SIZE", "2"))
GROUPS = (("ADASUM_HVD_GROUP_OP", "average"), ("ADASUM_HVD_GROUP_SIZE", "2"))


def torch(
    backend: str,
    ranks: int,
    *cases: str,
    environment: tuple[tuple[str, str], ...] = (),
    hosts: str = "",
) -> Configuration:
    files = "+".join((OPS, *cases))
    return Configuration(files, backend, ranks, environment, hosts, "torch")


# Most of it runs over MPI: a message of Horovod's costs several times as much over Gloo, where
# ranks share few processors. What is about Gloo, and more ranks, are in make soak, too.
ALONE = torch("gloo", 1, OPTIMIZER, TOOLS, MONITOR, OFFLOAD, CELLS)
GLOO_2 = torch("gloo", 2, OPTIMIZER, TOOLS, MONITOR, DRIFT)
GLOO_3 = torch("gloo", 3, environment=NETWORK)
GLOO_4 = torch("gloo", 4)  # for its bits and its path; all of it in make soak
MPI_2 = torch("mpi", 2, OPTIMIZER, TOOLS, MODES, environment=NETWORK)
MPI_3 = torch("mpi", 3, OPTIMIZER, TOOLS, OFFLOAD, CELLS)  # 8 in make soak
MPI_4 = torch("mpi", 4, MODES, "torch.test_convergence", environment=NETWORK)
MPI_5 = torch("mpi", 5, environment=NETWORK)  # and on Gloo in make soak
TINY_MPI = torch("mpi", 3, MONITOR, environment=TINY + NETWORK)
PORTABLE_MPI = torch("mpi", 4, environment=PORTABLE)
STAGED_MPI = torch("mpi", 3, environment=TINY + STAGED + THREADS)
UNEQUAL_HOSTS = torch("gloo", 3, hosts="localhost:1,127.0.0.1:2")
TWO_HOSTS = torch("gloo", 4, hosts="localhost:2,127.0.0.1:2")
SPLIT_MPI = torch("mpi", 4, MONITOR, environment=TINY + SPLIT)
GROUPED = torch("mpi", 4, MONITOR, environment=GROUPS)
CONFIGURATIONS = [
    ALONE, GLOO_2, GLOO_3, MPI_2, MPI_3, MPI_4, MPI_5,
    TINY_MPI, PORTABLE_MPI, STAGED_MPI, UNEQUAL_HOSTS, TWO_HOSTS, SPLIT_MPI, GROUPED,
]  # fmt: skip


@every_case(CONFIGURATIONS)
def test_case(outcome_of, configuration: Configuration, name: str) -> None:
    if configuration is GROUPED and name in (
        "case_properties",  # orthogonal inputs add up: not where groups are averaged
        "case_cancelling_pairs",
    ):
        pytest.skip("a property of AdaSum all the way down")
    outcome_of(configuration).check(name, configuration.ranks)


@pytest.mark.needs("case_process_set")
@pytest.mark.parametrize("configuration", [ALONE], ids=str)
def test_a_case_with_nothing_to_check_is_skipped(outcome_of, configuration) -> None:
    with pytest.raises(pytest.skip.Exception, match="needs 2 ranks"):
        outcome_of(configuration).check("case_process_set", 1)


def test_a_case_is_skipped_by_all_ranks_or_by_none() -> None:
    verdicts = [{"error": "", "skipped": why} for why in ("", "needs more", "")]
    outcome = Outcome({"case_a": dict(enumerate(verdicts))})
    with pytest.raises(AssertionError, match=r"skipped on some ranks only.*needs more"):
        outcome.check("case_a", 3)
    outcome.verdicts["case_a"][1]["skipped"] = ""
    outcome.check("case_a", 3)


@pytest.mark.needs("case_every_dtype_and_size")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GLOO_2, MPI_2),
        (GLOO_3, MPI_3),
        (GLOO_4, MPI_4),
        (GLOO_3, TINY_MPI),
        (GLOO_4, PORTABLE_MPI),
        (GLOO_3, STAGED_MPI),
    ],
    ids=str,
)
def test_same_bits(outcome_of, one: Configuration, other: Configuration) -> None:
    case = "case_every_dtype_and_size"
    mine, theirs = (outcome_of(c).results(case)[0] for c in (one, other))
    assert len(mine) == 4
    assert mine == theirs


@pytest.mark.needs("case_path")
@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (TWO_HOSTS, "levels of 2 x 2 ranks; inside a host shared memory"),
        (GLOO_4, "shared memory"),
        (GLOO_3, "network (ADASUM_HVD_LOCAL=off)"),
        (UNEQUAL_HOSTS, "inside a host shared memory"),
    ],
    ids=str,
)
def test_ranks_know_their_path(
    outcome_of, configuration: Configuration, words: str
) -> None:
    paths = outcome_of(configuration).results("case_path")
    assert len(paths) == configuration.ranks
    assert all(path.startswith(words) for path in paths.values()), paths
