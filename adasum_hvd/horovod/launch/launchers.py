"""The launchers that start ranks, as a table of the variables that they set.

A process may have the variables of several launchers: of an allocation's step, of a proxy, of the
job of its parent. The innermost one counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from adasum_hvd.horovod.launch import slurm_lists
from adasum_hvd.horovod.launch.launch_context import LaunchContext, LaunchError

Environment = Mapping[str, str]
OPEN_MPI, OTHER_MPI = "Open MPI", "MPICH"
# By family of MPI, the variables from which it learns a rank's number.
_READ_BY_MPI = {
    OPEN_MPI: ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    OTHER_MPI: ("PMI_RANK", "PMI_ID"),
}


class Process(NamedTuple):
    """This process or one above it, with the environment in which it has started."""

    pid: int
    name: str
    environment: Environment


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks, with the names of the variables that it sets."""

    name: str  # for messages
    level: int  # launchers of a higher level start those of a lower one
    rank: tuple[str, ...]  # the rank's number; the first that is set counts
    size: str  # ranks in the job
    local_rank: str = ""  # the rank's number on its host; "" if there is none
    local_size: str = ""  # ranks on this host
    cross_rank: str = ""  # this host's number
    cross_size: str = ""  # hosts in the job
    hosts: str = ""  # a list of the hosts, in the order of their ranks
    job: tuple[str, ...] = ()  # variables that together name the job, and no other one
    # Any of them shows the launcher; by default, those of the rank.
    signs: tuple[str, ...] = ()
    only_with: str = ""  # a variable that it always sets, too
    required: tuple[str, ...] = ()  # of several ranks, in addition to rank and size
    remedy: str = "export them on all ranks"  # if a variable is missing or wrong
    has_mpi: bool = True  # an MPI library may find the ranks by itself
    daemons: tuple[str, ...] = ()  # names of its processes that start ranks
    task: str = ""  # the number of the process that it has started for this rank
    # Returns or corrects fields of the context.
    complete: Callable[[Environment], dict[str, Any]] | None = None

    def is_seen(self, environment: Environment) -> bool:
        """Return whether this launcher's variables are set."""
        found = any(environment.get(name) for name in self.signs or self.rank)
        return found and (not self.only_with or bool(environment.get(self.only_with)))

    def rank_variable(self, environment: Environment) -> str:
        """Return the name of the variable that has this rank's number."""
        return next((name for name in self.rank if environment.get(name)), self.rank[0])

    def depth(self, environment: Environment, chain: Sequence[Process]) -> int:
        """Return where the launcher is in a chain of processes: after those that it started."""
        names = *self.rank, self.local_rank, self.cross_rank, *self.job, *self.signs
        for depth, (_, process, own) in enumerate(chain):
            has_these = all(own.get(name) == environment.get(name) for name in names)
            if process in self.daemons or not has_these:
                return depth
        return len(chain)

    def context(self, environment: Environment, process: str = "") -> LaunchContext:
        """Return this process's place in the job; `process` names the launcher's on this host."""
        rank = self.rank_variable(environment)
        required = () if environment.get(self.size) == "1" else self.required
        self._require(environment, rank, self.size, *required)
        names = {"rank": rank, "size": self.size, "port": "MASTER_PORT"}
        for field in ("local_rank", "local_size", "cross_rank", "cross_size"):
            names[field] = getattr(self, field)
        fields: dict[str, Any] = {
            field: self._number(environment, name)
            for field, name in names.items()
            if environment.get(name)
        }
        fields["address"] = environment.get("MASTER_ADDR")
        fields |= self.complete(environment) if self.complete else {}
        is_one_host = fields["size"] in (1, fields.get("local_size"))
        is_one_host |= fields.get("cross_size") == 1
        if not fields["address"] and not is_one_host:
            self._require(environment, "MASTER_ADDR")
        fields["address"] = fields["address"] or "127.0.0.1"
        job = ".".join(environment.get(name, "") for name in self.job).strip(".")
        return LaunchContext(self.name, job=job or process * is_one_host, **fields)

    def _require(self, environment: Environment, *names: str) -> None:
        missing = [name for name in names if not environment.get(name)]
        if missing:
            raise LaunchError(
                f"{self.name}: expected {', '.join(names)} in the environment, but got "
                f"no {', '.join(missing)}; {self.remedy}"
            )

    def _number(self, environment: Environment, name: str) -> int:
        value = environment[name]
        if not value.isdecimal():
            raise LaunchError(
                f"{self.name}: expected an integer >= 0 in {name}, but got {value!r}; "
                f"{self.remedy}"
            )
        return int(value)


def _of_slurm(environment: Environment) -> dict[str, Any]:
    """Return the number of this node's tasks, and rank 0's host: the step's first node."""
    node, nodes = environment["SLURM_NODEID"], environment["SLURM_STEP_NUM_NODES"]
    try:
        tasks = slurm_lists.counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        names = slurm_lists.items(environment["SLURM_STEP_NODELIST"])
        first = next(slurm_lists.expand(names[0] if names else ""))
    except slurm_lists.ListError as error:
        raise LaunchError(
            f"Slurm: {error}; export the variables that srun set"
        ) from error
    if str(len(tasks)) != nodes or int(node) >= len(tasks):
        raise LaunchError(
            f"Slurm: expected tasks of every node in SLURM_STEP_TASKS_PER_NODE, but got those of "
            f"{len(tasks)}, SLURM_NODEID={node} and SLURM_STEP_NUM_NODES={nodes}; start with srun"
        )
    address = environment.get("MASTER_ADDR") or first
    return {"local_size": tasks[int(node)], "address": address}


def _of_pod(environment: Environment) -> dict[str, Any]:
    """Return a pod's numbers: it has one rank. Pods that train alone have an index, too."""
    alone = {"rank": 0} if environment["WORLD_SIZE"] == "1" else {}
    return {"local_rank": 0, "local_size": 1, **alone}


HOROVOD = Launcher(
    "Horovod", 0, ("HOROVOD_RANK",), "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE",
    # horovodrun has set them, or an earlier start in this process.
    signs=("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR",
           "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    has_mpi=False,
)  # fmt: skip
_TORCH: dict[str, Any] = {
    "rank": ("RANK",), "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE",
    "cross_rank": "GROUP_RANK", "cross_size": "GROUP_WORLD_SIZE",
    "job": ("MASTER_PORT",), "required": ("MASTER_ADDR", "MASTER_PORT"), "has_mpi": False,
    "remedy": "start with torchrun, or export all of them",
}  # fmt: skip
# Scripts copy them from another launcher's variables, or an operator gives them to a pod.
EXPORTED = Launcher("RANK and WORLD_SIZE", 2, **_TORCH)
PMIX = Launcher(
    "PMIx", 2, ("PMIX_RANK",), "WORLD_SIZE", job=("PMIX_NAMESPACE",),
    remedy="export them in addition to those of prterun",
)  # fmt: skip
# Of equal levels, the first that applies has more to say.
LAUNCHERS = (
    HOROVOD,
    Launcher("torchrun", 1, signs=("TORCHELASTIC_RUN_ID",), **_TORCH),
    Launcher(
        "Open MPI", 2, ("OMPI_COMM_WORLD_RANK",), "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", job=("PMIX_NAMESPACE",),
        remedy="start with mpirun; across hosts with -x MASTER_ADDR=...",
    ),
    Launcher(
        "MVAPICH", 2, ("MV2_COMM_WORLD_RANK",), "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "jsrun", 2, ("JSM_NAMESPACE_RANK",), "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE", job=("PMIX_NAMESPACE",),
    ),
    Launcher(
        "PALS", 2, ("PALS_RANKID",), "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE",
        "PALS_NODEID", job=("PALS_APID",),
    ),
    Launcher(
        "Flux", 3, ("FLUX_TASK_RANK",), "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID",
        cross_size="FLUX_JOB_NNODES", job=("FLUX_JOB_ID",),
    ),
    Launcher(
        "Slurm", 3, ("SLURM_PROCID",), "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "",
        "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"), only_with="SLURM_STEP_NUM_TASKS",
        required=("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES",
                  "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
        remedy="start with srun", task="SLURM_TASK_PID", complete=_of_slurm,
    ),
    Launcher(
        "PMI", 2, ("PMI_RANK", "PMI_ID", "MPI_LOCALRANKID"), "PMI_SIZE",
        "MPI_LOCALRANKID", "MPI_LOCALNRANKS", job=("I_MPI_HYDRA_UUID",),
        daemons=("hydra_pmi_proxy", "mpiexec.gforker"),
        remedy="export them in addition to those of mpiexec; MASTER_ADDR is rank 0's host, or "
        "127.0.0.1",
    ),
    PMIX,
    EXPORTED,
    Launcher(
        "Kubernetes", 4, ("JOB_COMPLETION_INDEX",), "WORLD_SIZE", job=("MASTER_ADDR",),
        required=("MASTER_ADDR",), has_mpi=False, complete=_of_pod,
        remedy="put WORLD_SIZE (the Job's completions) and MASTER_ADDR (<job>-0.<service>) into "
        "the manifest as in examples/kubernetes; WORLD_SIZE=1 for pods that train alone",
    ),
)  # fmt: skip


class _Row(NamedTuple):
    """A launcher whose variables are set, its place, and the numbers that it gave."""

    depth: int
    level: int
    launcher: Launcher
    rank: str | None
    size: str | None

    def contradicts(self, other: _Row) -> bool:
        """Return whether the two cannot be of one job."""
        pairs = (self.rank, other.rank), (self.size, other.size)
        return any(one != two for one, two in pairs if one and two)

    def is_copied_from(self, other: _Row) -> bool:
        """Return whether these are variables that a script has made of an MPI launcher's."""
        return (
            self.launcher is EXPORTED
            and other.launcher.level == EXPORTED.level
            and (self.size is None or self.depth <= other.depth)
            and (self.size is None or not self.contradicts(other))
        )


def _row(
    launcher: Launcher, environment: Environment, chain: Sequence[Process]
) -> _Row:
    depth = launcher.depth(environment, chain)
    size = environment.get(launcher.size)
    if launcher is PMIX or (
        chain[depth:] and chain[depth].environment.get(launcher.size) == size
    ):
        size = None  # the user's, or of an outer launcher that uses the same variable
    # srun's daemon has another environment than srun, so that its depth tells nothing.
    is_task = depth and environment.get(launcher.task) == str(chain[depth - 1].pid)
    level = -1 if is_task else launcher.level
    rank = environment.get(launcher.rank_variable(environment))
    return _Row(depth, level, launcher, rank, size)


@dataclass(frozen=True)
class Seen:
    """The innermost launcher of a process."""

    launcher: Launcher
    environment: Environment  # without variables of outer launchers that it reads, too
    process: str  # a name of the launcher's process on this host, "" if it is unknown
    equal: Sequence[Launcher]  # whose variables it has set, itself first
    outer: Sequence[Launcher]  # the others that are seen

    def context(self) -> LaunchContext:
        """Return the place of this process in the job."""
        return self.launcher.context(self.environment, self.process)

    def is_read_by(self, mpi: str) -> bool:
        """Return whether an MPI library of a family learns this rank's number."""
        names = {name for one in self.equal for name in one.rank}
        read = names.intersection(_READ_BY_MPI.get(mpi, ()))
        return self.launcher.has_mpi and any(map(self.environment.get, read))


def innermost(
    environment: Environment, chain: Sequence[Process] | None = None
) -> Seen | None:
    """Return the innermost launcher whose variables are set, None if there is none.

    A launcher's own process does not have the variables that it sets, so the processes above a
    rank (`chain`: this one, its parent, and so on) show which launcher has started which. If they
    do not, levels decide; launchers of one level that contradict one another are a LaunchError.

    Example:
        >>> step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
        >>> innermost(step | {"PMI_RANK": "1", "PMI_SIZE": "2"}).launcher.name
        'PMI'
        >>> innermost({"HOME": "/root"}) is None
        True
    """
    seen = [launcher for launcher in LAUNCHERS if launcher.is_seen(environment)]
    if not seen:
        return None
    chain = _chain() if chain is None else chain
    rows = [_row(launcher, environment, chain) for launcher in seen]
    rows = [one for one in rows if not any(map(one.is_copied_from, {*rows} - {one}))]
    first = min(rows, key=lambda row: row[:2])
    unordered = [row for row in rows if row[:2] == first[:2] and row.contradicts(first)]
    if unordered:
        found = [
            name_with_numbers(row.launcher, environment) for row in (first, *unordered)
        ]
        raise LaunchError(
            f"launchers: expected variables of one job, but got those of {' and '.join(found)}; "
            "unset those of the outer one (env -u NAME) in the command that it starts"
        )
    # Those that agree describe one job; the first of them says most.
    equal = [r for r in rows if r.depth == first.depth and not r.contradicts(first)]
    outer = [row.launcher for row in rows if row not in equal]
    if any("MASTER_PORT" in launcher.required for launcher in outer):
        names = environment.keys() - {"MASTER_ADDR", "MASTER_PORT"}
        environment = {name: environment[name] for name in names}
    namespace, above = os.stat("/proc/self/ns/pid").st_ino, chain[first.depth :]
    process = f"{namespace}.{above[0].pid}" if first.depth and above else ""
    agreeing = [row.launcher for row in equal]
    return Seen(agreeing[0], environment, process, agreeing, outer)


def name_with_numbers(launcher: Launcher, environment: Environment) -> str:
    """Return a launcher's name with its values of rank and size, for messages."""
    names = launcher.rank_variable(environment), launcher.size
    return f"{launcher.name} ({', '.join(f'{n}={environment.get(n)}' for n in names)})"


def _chain() -> list[Process]:
    """Return this process and those above it, as far as they can be read."""
    found, this = [], psutil.Process()
    try:
        for process in (this, *this.parents()):
            found.append(Process(process.pid, process.name(), process.environ()))
    except psutil.Error:  # another user's
        pass
    return found
