"""A rank's place by its environment, and the variables for Horovod: pure functions."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest
from horovod.runner.http.http_server import KVStoreHandler, RendezvousHTTPServer
from horovod.runner.util.threads import in_thread

from adasum_hvd.horovod.launch import slurm_lists, variables
from adasum_hvd.horovod.launch.assignment import RankInfo, assign, server_address
from adasum_hvd.horovod.launch.launch_context import LaunchContext, LaunchError
from adasum_hvd.horovod.launch.launchers import LAUNCHERS, Process, innermost
from adasum_hvd.horovod.launch.launchers import OPEN_MPI as OPEN_MPI_LIBRARY
from adasum_hvd.horovod.launch.rendezvous import HttpStore
from adasum_hvd.horovod.launch.route import Route, find, interface_with

OF_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NONE, HERE = (None, None), "127.0.0.1"
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "n0", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "node[03-04,9]",
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "job@1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "train-0.train",
}


RUN_BY = {  # the variables of a rank, by what has started it
    "Horovod": {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"},
    "torchrun": TORCHRUN,
    "RANK and WORLD_SIZE": {k: TORCHRUN[k] for k in OF_TORCH},  # the PyTorchJob operator
    "Open MPI": OPEN_MPI | {"PMIX_RANK": "1"},
    "MVAPICH": {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "3", "PMI_ID": "2",
                "MV2_COMM_WORLD_LOCAL_RANK": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "3"},
    "jsrun": {"JSM_NAMESPACE_RANK": "4", "JSM_NAMESPACE_SIZE": "9", "PMIX_RANK": "4",
              "JSM_NAMESPACE_LOCAL_RANK": "4", "JSM_NAMESPACE_LOCAL_SIZE": "9",
              "PMIX_NAMESPACE": "jsm"},
    "PALS": {"PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1",
             "PALS_LOCAL_SIZE": "4", "PALS_NODEID": "1", "PALS_APID": "a", "MASTER_ADDR": "n0"},
    "Flux": {"FLUX_TASK_RANK": "6", "FLUX_JOB_SIZE": "7", "FLUX_TASK_LOCAL_ID": "6",
             "FLUX_JOB_NNODES": "1", "FLUX_JOB_ID": "f", "PMI_RANK": "6", "PMI_SIZE": "7"},
    "Slurm": SLURM,
    "PMI": PMI,
    "PMIx": {"PMIX_RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "n0", "PMIX_NAMESPACE": "p"},
    "Kubernetes": KUBERNETES,
}  # fmt: skip


# Both set PMIX_NAMESPACE, or PMI_RANK next to PMI_ID: an error.
SHARE_VARIABLES = {
    ("Open MPI", "jsrun"), ("Open MPI", "PMIx"), ("jsrun", "Open MPI"), ("jsrun", "PMIx"),
    ("PALS", "MVAPICH"), ("Flux", "MVAPICH"), ("PMI", "MVAPICH"),
}  # fmt: skip


def numbers(context: LaunchContext | None) -> tuple:
    assert context is not None
    return (
        context.rank, context.size, context.local_rank, context.local_size,
        context.cross_rank, context.cross_size, context.address,
    )  # fmt: skip


def read(environment: dict[str, str]) -> LaunchContext | None:
    seen = innermost(environment)
    return seen.context() if seen else None


def test_every_launcher_is_tried() -> None:
    assert {launcher.name for launcher in LAUNCHERS} == set(RUN_BY)


@pytest.mark.parametrize(
    ("environment", "expected", "port"),
    [
        (RUN_BY["torchrun"], (3, 6, 1, 2, 1, 3, "n0"), 29500),
        (RUN_BY["RANK and WORLD_SIZE"], (3, 6, None, None, None, None, "n0"), 29500),
        (RUN_BY["Open MPI"], (1, 4, 1, 4, None, None, "127.0.0.1"), None),
        (RUN_BY["MVAPICH"], (2, 3, 2, 3, None, None, "127.0.0.1"), None),
        (RUN_BY["jsrun"], (4, 9, 4, 9, None, None, "127.0.0.1"), None),
        (RUN_BY["PALS"], (5, 8, 1, 4, 1, None, "n0"), None),
        (RUN_BY["Flux"], (6, 7, 6, None, None, 1, "127.0.0.1"), None),
        (RUN_BY["Slurm"], (4, 5, 0, 1, 2, 3, "node03"), None),
        (SLURM | {"MASTER_ADDR": "n", "MASTER_PORT": "1"}, (4, 5, 0, 1, 2, 3, "n"), 1),
        (SLURM | {"PMI_RANK": "4", "PMI_SIZE": "5"}, (4, 5, 0, 1, 2, 3, "node03"), None),
        (SLURM | {"PMIX_RANK": "4"}, (4, 5, 0, 1, 2, 3, "node03"), None),
        (RUN_BY["PMI"], (1, 2, 1, 2, None, None, "127.0.0.1"), None),
        (RUN_BY["PMIx"], (3, 5, None, None, None, None, "n0"), None),
        (RUN_BY["Kubernetes"], (2, 3, 0, 1, None, None, "train-0.train"), None),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, (0, 1, 1, 2, 1, 3, "n0"), 29500),
        ({"JOB_COMPLETION_INDEX": "5", "WORLD_SIZE": "1"}, (0, 1, 0, 1, *NONE, HERE), None),
        # Scripts copy an MPI launcher's variables, or use a name for something else.
        (OPEN_MPI | {"RANK": "16"}, (1, 4, 1, 4, None, None, "127.0.0.1"), None),
        (
            PMI | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n", "MASTER_PORT": "7"},
            (1, 2, 1, 2, None, None, "n"),
            7,
        ),
    ],
)  # fmt: skip
def test_places(environment, expected, port) -> None:
    context = read(environment)
    assert numbers(context) == expected
    assert context.port == port
    # Below what Linux gives to any connection.
    assert all(20000 <= number < 32768 for number in context.ports) or port
    assert read(environment) == context


@pytest.mark.parametrize("inner", RUN_BY)
@pytest.mark.parametrize("outer", RUN_BY)
def test_the_innermost_launcher_counts(outer: str, inner: str) -> None:
    """A rank of one launcher starts another, whose own process has no variable of its own yet."""
    if outer == inner:
        return
    around = {name: f"9{value}" for name, value in RUN_BY[outer].items()}
    around |= {name: "99" for name in around if name.endswith(("SIZE", "NUM_TASKS"))}
    both = around | RUN_BY[inner]
    chain = [Process(4, "python", both), Process(3, "sh", both)]
    chain += [Process(2, "launcher", around), Process(1, "init", {})]
    if (outer, inner) in SHARE_VARIABLES:
        with pytest.raises(LaunchError, match="unset those of the outer one"):
            innermost(both, chain)
        return
    expected, of_outer = rank_and_size(RUN_BY[inner]), rank_and_size(around)
    assert rank_and_size(both, chain) == expected
    assert innermost(both, chain).process.endswith(".2")
    # On a host on which the other processes cannot be seen, levels decide, or it is an error.
    # The last two have their size from the user.
    try:
        hidden = rank_and_size(both, chain[:2])
        assert hidden in (expected, of_outer) or inner in ("PMIx", "Kubernetes")
    except LaunchError as error:
        assert "unset those of the outer one" in str(error)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("Open MPI", "torchrun"), ("PMI", "torchrun"), ("Slurm", "torchrun"),
        ("Kubernetes", "torchrun"), ("Slurm", "Open MPI"), ("Slurm", "PMI"),
        ("Kubernetes", "Open MPI"), ("Kubernetes", "PMI"), ("Kubernetes", "Slurm"),
        ("torchrun", "Horovod"), ("Slurm", "Horovod"), ("Slurm", "RANK and WORLD_SIZE"),
    ],
)  # fmt: skip
def test_launchers_whose_order_is_known(outer: str, inner: str) -> None:
    pbs = {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_JOBID": "1"}
    both = pbs | RUN_BY[outer] | RUN_BY[inner]
    assert rank_and_size(both) == rank_and_size(RUN_BY[inner])


def rank_and_size(environment: dict[str, str], chain: Sequence[Process] = ()) -> list:
    seen = innermost(environment, chain)
    assert seen is not None
    names = seen.launcher.rank_variable(environment), seen.launcher.size
    return [environment.get(name) for name in names]


def test_the_port_and_the_mpi_of_an_outer_job_are_not_the_inner_ones() -> None:
    """torchrun's rank starts mpiexec: its MASTER_PORT is in use. mpirun's PMIX_RANK is not read."""
    both = TORCHRUN | OPEN_MPI | {"PMIX_RANK": "1"} | PMI
    chain = [
        Process(4, "python", both),
        Process(3, "hydra_pmi_proxy", without(both, *PMI)),
    ]
    seen = innermost(both, [*chain, Process(1, "init", {})])
    assert (seen.context().port, seen.context().address) == (None, "127.0.0.1")
    assert not seen.is_read_by(OPEN_MPI_LIBRARY) and seen.is_read_by("MPICH")
    assert {one.name for one in seen.outer} == {
        "torchrun",
        "Open MPI",
        "PMIx",
        "RANK and WORLD_SIZE",
    }


def test_numbers_that_a_process_has_given_itself_are_the_innermost() -> None:
    """Ray's workers, and programs that form several jobs of one step's tasks."""
    exported = RUN_BY["RANK and WORLD_SIZE"]
    task = [Process(7, "python", SLURM), Process(1, "slurmstepd", {})]
    assert innermost(SLURM | exported, task).launcher.name == "RANK and WORLD_SIZE"


def test_tasks_of_srun_inside_another_job_are_known_by_their_number() -> None:
    """srun passes all variables on, and its daemon's environment tells nothing."""
    both = SLURM | PMI | {"SLURM_TASK_PID": "7"}
    chain = [
        Process(8, "python", both),
        Process(7, "sh", both),
        Process(1, "slurmstepd", {}),
    ]
    assert innermost(both, chain).launcher.name == "Slurm"
    both = both | {"SLURM_TASK_PID": "99"}  # a proxy, on another host
    chain = [one._replace(environment=both) for one in chain[:2]]
    assert innermost(both, chain).launcher.name == "PMI"


def test_a_proxy_inside_a_rank_with_the_same_numbers() -> None:
    """MPICH's variables do not differ then; its proxy is known by name."""
    chain = [Process(4, "python", PMI), Process(3, "hydra_pmi_proxy", PMI)]
    chain += [Process(2, "python", PMI), Process(1, "hydra_pmi_proxy", {})]
    assert innermost(PMI, chain).process.endswith(".3")


def test_two_jobs_on_a_host_have_two_ports() -> None:
    jobs = [SLURM | {"SLURM_STEP_ID": str(step)} for step in range(20)]
    assert len({read(job).ports[0] for job in jobs}) > 15
    chains = [
        [Process(9, "python", PMI), Process(pid, "mpiexec", {})] for pid in range(20)
    ]
    contexts = [innermost(PMI, chain).context() for chain in chains]
    assert len({context.ports[0] for context in contexts}) > 15
    assert all(len(context.ports) > 1 for context in contexts)
    # Ranks of several hosts have no common name, so they cannot search.
    across = PMI | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "MASTER_ADDR": "n"}
    assert len({innermost(across, chain).context().ports for chain in chains}) == 1
    assert len(read(across).ports) == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},  # a batch script
        {"WORLD_SIZE": "2"},
        {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_JOBID": "1", "PBS_NODEFILE": "f"},
    ],
)  # fmt: skip
def test_a_process_alone(environment) -> None:
    assert read(environment) is None


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: environment[name] for name in environment if name not in names}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (without(TORCHRUN, "RANK"), "torchrun: expected RANK, .* got no RANK; start with"),
        (without(TORCHRUN, "WORLD_SIZE", "MASTER_PORT"), "got no WORLD_SIZE, MASTER_PORT"),
        (TORCHRUN | {"RANK": "6"}, "torchrun: expected a rank from 0 to 5, but got rank 6"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "expected a local rank from 0 to 1, but got local rank 2"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "an integer >= 0 in MASTER_PORT, but got 'x'"),
        (without(SLURM, "SLURM_NODEID"), "Slurm: expected .* got no SLURM_NODEID; start with"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "got those of 1, SLURM_NODEID=2"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2x"}, r"counts such as 2\(x3\),1, but got '2x'"),
        (SLURM | {"SLURM_NODEID": "x"}, "an integer >= 0 in SLURM_NODEID, but got 'x'"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "expected MASTER_ADDR .* across hosts with -x MASTER_ADDR",
        ),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "got no OMPI_COMM_WORLD_SIZE"),
        ({"PMIX_RANK": "0"}, "PMIx: expected PMIX_RANK, WORLD_SIZE .* got no WORLD_SIZE"),
        ({"PMI_ID": "0"}, "PMI: expected PMI_ID, PMI_SIZE .* got no PMI_SIZE"),
        ({"MPI_LOCALRANKID": "0"}, "PMI: .* got no PMI_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "no MASTER_ADDR; .* rank 0's host, or 127.0.0.1"),
        ({"PALS_RANKID": "0"}, "PALS: .* got no PMI_SIZE"),
        ({"FLUX_TASK_RANK": "0"}, "Flux: .* got no FLUX_JOB_SIZE"),
        (PMI | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (
            r"got those of Open MPI \(OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4\) and "
            r"PMI \(PMI_RANK=1, PMI_SIZE=2\); unset those of the outer one"
        )),
        (without(KUBERNETES, "WORLD_SIZE"), r"Kubernetes: .* got no WORLD_SIZE; put .*example"),
        (without(KUBERNETES, "MASTER_ADDR"), r"got no MASTER_ADDR; .*<job>-0\.<service>"),
    ],
)  # fmt: skip
def test_wrong_environments_name_the_variables(environment, words) -> None:
    with pytest.raises(LaunchError, match=words):
        read(environment)


@pytest.mark.parametrize(
    ("text", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("r[2,4]c[07-9]x,y", "r2c07x")],
)
def test_slurms_lists(text, first) -> None:
    environment = SLURM | {"SLURM_STEP_NODELIST": text}
    assert read(environment).address == first
    assert slurm_lists.counts("3,1(x2)") == [3, 1, 1]


@pytest.mark.parametrize(
    ("environment", "mpi", "expected"),
    [
        (TORCHRUN, OPEN_MPI_LIBRARY, False),
        (TORCHRUN | {"HOROVOD_RANK": "0"}, OPEN_MPI_LIBRARY, True),
        (TORCHRUN | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "a"}, "", True),
        (TORCHRUN | {"HOROVOD_CONTROLLER": "mpi"}, OPEN_MPI_LIBRARY, True),
        (TORCHRUN | {"HOROVOD_CONTROLLER": "mpi"}, "", False),
        (OPEN_MPI, OPEN_MPI_LIBRARY, True),
        (OPEN_MPI, "MPICH", False),
        (OPEN_MPI, "", False),
        (OPEN_MPI | {"HOROVOD_CONTROLLER": "gloo"}, OPEN_MPI_LIBRARY, False),
        (OPEN_MPI | TORCHRUN, OPEN_MPI_LIBRARY, False),
        (OPEN_MPI | {"RANK": "1", "WORLD_SIZE": "4"}, OPEN_MPI_LIBRARY, True),
        (SLURM, OPEN_MPI_LIBRARY, False),
        (SLURM | {"PMI_RANK": "4", "PMI_SIZE": "5"}, OPEN_MPI_LIBRARY, False),
        (SLURM | {"PMI_RANK": "4", "PMI_SIZE": "5"}, "MPICH", True),
        (SLURM | {"PMIX_RANK": "4"}, OPEN_MPI_LIBRARY, True),
        (PMI, OPEN_MPI_LIBRARY, False),  # Open MPI does not speak Hydra's PMI
        (PMI, "MPICH", True),
        (RUN_BY["PMIx"], OPEN_MPI_LIBRARY, True),
        ({"HOROVOD_CONTROLLER": "mpi"}, OPEN_MPI_LIBRARY, True),
        ({"HOROVOD_CONTROLLER": "gloo"}, OPEN_MPI_LIBRARY, False),
    ],
)
def test_what_is_left_to_horovod(environment, mpi, expected) -> None:
    assert variables.starts_by_itself(environment, mpi) is expected
    assert (variables.context_to_start(environment, mpi) is None) is expected


def test_one_process_starts_over_gloo_only_if_asked() -> None:
    assert variables.context_to_start({}, OPEN_MPI_LIBRARY) is None
    context = variables.context_to_start(
        {"HOROVOD_CONTROLLER": "gloo"}, OPEN_MPI_LIBRARY
    )
    assert numbers(context)[:2] == (0, 1)


def test_another_size_than_the_launchers_is_an_error() -> None:
    expected = variables.Expected("the value of PMI_SIZE (PMI)", 2)
    words = r"expected 2 ranks, the value of PMI_SIZE \(PMI\), but got hvd.size\(\) 1: .*gloo"
    with pytest.raises(LaunchError, match=words):
        variables.check_size(1, expected)
    with pytest.raises(LaunchError, match="expected a number of ranks, of PMIx"):
        variables.check_size(1, variables.Expected("of PMIx", None))
    variables.check_size(2, expected)
    variables.check_size(3, variables.Expected("of PMIx", None))
    variables.check_size(1, expected, [0])  # Horovod's own argument: these ranks only
    variables.check_size(1, None, process_sets=[])


def test_a_computed_port_in_use_leaves_the_next_one() -> None:
    """Another program has the first port, another job's store the second one."""
    first = LaunchContext("PMI", 0, 2, "127.0.0.1", job=f"{os.getpid()} first")
    other = replace(first, job="other")
    with socket.socket() as taken:
        taken.bind(("", first.ports[0]))
        taken.listen()
        in_front = RendezvousHTTPServer(("", first.ports[1]), KVStoreHandler, 0)
        in_thread(target=in_front.serve_forever)
        stores = [HttpStore(replace(first, rank=rank), 20) for rank in (0, 1)]
        stores[1].set("key", "value")
        assert stores[0].get("key") == b"value"
        assert stores[1]._ports == [first.ports[2]]
        given = replace(first, port=first.ports[0] - 1)
        with pytest.raises(
            LaunchError, match=r"a free port among \d+, .*; set MASTER_PORT"
        ):
            HttpStore(given, 1)
        with pytest.raises(TimeoutError):  # not the other job's store
            HttpStore(replace(other, rank=1, port=first.ports[1] - 1), 1).get("key")
        in_front.shutdown()
        in_front.server_close()


def infos(
    *hosts: str, numbered: bool = False, has_local: bool = False
) -> list[RankInfo]:
    """Return the reports of ranks on these hosts, each with its local rank if `has_local`."""
    found = []
    for rank, host in enumerate(hosts):
        local = hosts[:rank].count(host), hosts.count(host)
        contexts = sorted(set(hosts)).index(host), len(set(hosts))
        context = LaunchContext(
            "torchrun", rank, len(hosts), "n0", 1, "", *(local if has_local else (None, None)),
            *(contexts if numbered else (None, None)),
        )  # fmt: skip
        route = Route("10.0.0.1", "10.0.0.1" if host == hosts[0] else "10.0.0.2")
        found.append(RankInfo(context, "same" if numbered else host, route))
    return found


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("has_local", [False, True])
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aa", [(0, 2, 0, 1), (1, 2, 0, 1)]),
        ("aabb", [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        ("abab", [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        # Uneven: only two of three hosts have a second rank, and one a third.
        ("abbcaa", [
            (0, 3, 0, 3), (0, 2, 1, 3), (1, 2, 1, 2), (0, 1, 2, 3), (1, 3, 0, 2), (2, 3, 0, 1)
        ]),
    ],
)  # fmt: skip
def test_slots_of_any_placement(hosts, expected, has_local, numbered) -> None:
    slots = assign(infos(*hosts, has_local=has_local, numbered=numbered))
    assert [slot.rank for slot in slots] == list(range(len(hosts)))
    found = [(s.local_rank, s.local_size, s.cross_rank, s.cross_size) for s in slots]
    assert found == expected
    # One name for each host, in Horovod's rendezvous: two agents on one host are two hosts.
    assert len({slot.hostname for slot in slots}) == len(set(hosts))


def test_ranks_that_contradict_one_another() -> None:
    three = infos("a", "a", "b", has_local=True)
    with pytest.raises(LaunchError, match=r"expected ranks 0 to 1 .* got rank 0 of 3"):
        assign(three[:2])
    with pytest.raises(
        LaunchError, match=r"got rank 1 of 3 on host a in place of rank 0"
    ):
        assign([three[1], three[0], three[2]])
    words = r"local ranks \[0\] and a local size of 1 for ranks \[1\] on host b, but got.*\['2'\]"
    with pytest.raises(LaunchError, match=words):
        assign(
            [
                RankInfo(
                    LaunchContext("torchrun", 0, 2, "n0", 1, "", 0, 1),
                    "a",
                    three[0].route,
                ),
                RankInfo(
                    LaunchContext("torchrun", 1, 2, "n0", 1, "", 0, 2),
                    "b",
                    three[1].route,
                ),
            ]
        )
    assert "error" in variables.serve(three[:2])


def test_the_way_to_rank_0() -> None:
    assert server_address(infos("a", "a")) == "127.0.0.1"
    assert server_address(infos("a", "b")) == "10.0.0.1"
    assert find("localhost", 0).stays
    assert interface_with("127.0.0.1") == "lo"
    with pytest.raises(
        LaunchError, match=r"an interface with address 192\.0\.2\.1.* lo"
    ):
        interface_with("192.0.2.1")
    with pytest.raises(LaunchError, match=re.escape("got 'no.such.invalid'")):
        find("no.such.invalid", 0)
    with pytest.raises(
        LaunchError, match="HOROVOD_START_TIMEOUT: expected seconds, but got"
    ):
        variables.timeout_seconds({"HOROVOD_START_TIMEOUT": "soon"})
