"""Which ranks run which files of cases: one launch per configuration, shared by its files.

A new file of cases goes into the configurations that should run it. Every rank of a launch
imports a framework and Keras traces its functions, so a new configuration costs seconds to
minutes, and a new file in an existing one almost nothing. Files that share a launch start
alike: the first one's `init()`, `align()` and `shutdown()` count (worker.py), and all of
their `start()`.

To add an engine: write a file in `cases/distributed/` that runs the checks of `conformance.py`
with its reduction, define there how its ranks start (worker.py; Horovod is not needed), and
add a `Configuration` with its launcher and numbers of ranks.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from tests.parallel.harness.cases import Case, cases_in

Variables = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Configuration:
    """Files of cases, a launcher, a number of ranks and their environment."""

    files: tuple[str, ...]
    backend: str
    ranks: int
    environment: Variables = ()
    hosts: str = ""
    label: str = ""  # in the tests' names

    def __str__(self) -> str:
        extra = [f"{k.removeprefix('ADASUM_HVD_')}={v}" for k, v in self.environment]
        parts = [
            self.label or self.files[0],
            f"{self.backend}{self.ranks}",
            *extra,
            self.hosts,
        ]
        return "-".join(filter(None, parts)).lower()

    @property
    def framework(self) -> str:
        """Return what every rank imports: "torch", "tensorflow" or "" (neither)."""
        folders = {file.partition(".")[0] for file in self.files}
        if folders & {"tensorflow", "keras"} or self.files == TENSORFLOW_DEVICE:
            return "tensorflow"
        return "" if self.files == SIMULATED else "torch"

    @property
    def cases(self) -> list[Case]:
        return [case for file in self.files for case in cases_in(file)]


def _files(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}.test_{name}" for name in names.split())


OPS = _files("torch", "ops join fuzz")
OPTIMIZER = _files("torch", "optimizer buckets moved parameters scaler delta")
TOOLS = _files("torch", "tools broadcasting functions")
OFFLOAD = _files("torch", "adam_offload")
MONITOR = _files("torch", "monitor")
CELLS = _files("torch", "wrap_cells")
MODES = _files("torch", "parallel_modes local_sgd")
DRIFT = _files("torch", "drift weights misuse other_optimizers")
CONVERGENCE = _files("torch", "convergence")
ELASTIC = _files("torch", "elastic")
KERAS_OPTIMIZER = _files("keras", "optimizer")
KERAS_MONITOR = _files("keras", "monitor")
KERAS_MODES = _files("keras", "modes scales callbacks elastic other_optimizers")
KERAS_CELLS = _files("keras", "wrap_cells")
AGREEMENT = (
    *_files("keras", "agreement"),
    *_files("tensorflow", "arguments"),
    *_files("keras", "missing"),
)
TENSORFLOW_OPS = _files("tensorflow", "ops reducer")
SIMULATED = _files("device", "simulated")
LAYOUTS = _files("distributed", "sharded_layouts")
SHARDED = (
    *_files(
        "distributed",
        "replicate replicate_passes replicate_uses arguments local_sgd local_sgd_steps rules "
        "local_sgd_optimizers",
    ),
    *LAYOUTS,
)
CANCELLED = _files("distributed", "cancelled_shards")  # of three replicas or more

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
# Milliseconds between rounds of negotiation. Tracing is most of TensorFlow's work, and ranks that
# ask each other every millisecond, as they do unless this is set, take a quarter of the
# processors from it. A rank that waits for the others' round spins over MPI.
SELDOM = {"gloo": "20", "mpi": "5"}
SLICED = (("ADASUM_HVD_REPLICATE_BYTES", "0"),)
TWO_STREAMS = (("HOROVOD_NUM_NCCL_STREAMS", "2"),)
ASYNCHRONOUS = (("HOROVOD_ENABLE_ASYNC_COMPLETION", "1"),)


def torch(
    backend: str,
    ranks: int,
    *more: str,
    environment: Variables = (),
    hosts: str = "",
) -> Configuration:
    """Return a configuration of the op's cases and of more files."""
    return Configuration((*OPS, *more), backend, ranks, environment, hosts, "torch")


def tensorflow(backend: str, ranks: int, *more: str) -> Configuration:
    """Return a configuration of TensorFlow's op cases and of more files."""
    files = (*TENSORFLOW_OPS, *more)
    environment = (("HOROVOD_CYCLE_TIME", SELDOM[backend]),)
    return Configuration(files, backend, ranks, environment, label="tensorflow")


def simulated(
    ranks: int, environment: Variables = (), slots: tuple[int, ...] = ()
) -> Configuration:
    """Return a configuration of simulated devices, on hosts with these slots."""
    names = ("localhost", "127.0.0.1")
    hosts = ",".join(f"{n}:{s}" for n, s in zip(names, slots, strict=False))
    if slots:
        environment += (("ADASUM_TEST_HOSTS", ",".join(map(str, slots))),)
    return Configuration(SIMULATED, "gloo", ranks, environment, hosts, "simulated")


# Most of it runs over MPI: a message of Horovod's costs several times as much over Gloo, where
# ranks share few processors. What is about Gloo, and more ranks, are in make soak, too.
ALONE = torch("gloo", 1, *OPTIMIZER, *TOOLS, *MONITOR, *OFFLOAD, *CELLS)
GLOO_2 = torch("gloo", 2, *OPTIMIZER, *TOOLS, *MONITOR, *DRIFT, *ELASTIC)
GLOO_3 = torch("gloo", 3, environment=NETWORK)
GLOO_4 = torch("gloo", 4)  # for its bits and its path; all of it in make soak
MPI_2 = torch("mpi", 2, *OPTIMIZER, *TOOLS, *MODES, environment=NETWORK)
MPI_3 = torch("mpi", 3, *OPTIMIZER, *TOOLS, *OFFLOAD, *CELLS)  # 8 in make soak
MPI_4 = torch("mpi", 4, *MODES, *CONVERGENCE, *ELASTIC, environment=NETWORK)
MPI_5 = torch("mpi", 5, environment=NETWORK)  # and on Gloo in make soak
TINY_MPI = torch("mpi", 3, *MONITOR, environment=TINY + NETWORK)
PORTABLE_MPI = torch("mpi", 4, environment=PORTABLE)
STAGED_MPI = torch("mpi", 3, environment=TINY + STAGED + THREADS)
UNEQUAL_HOSTS = torch("gloo", 3, hosts="localhost:1,127.0.0.1:2")
TWO_HOSTS = torch("gloo", 4, hosts="localhost:2,127.0.0.1:2")
SPLIT_MPI = torch("mpi", 4, *MONITOR, environment=TINY + SPLIT)
GROUPED = torch("mpi", 4, *MONITOR, environment=GROUPS)

TENSORFLOW_GLOO_2 = tensorflow("gloo", 2, *KERAS_MODES, *KERAS_MONITOR, *KERAS_CELLS)
# Both on Gloo in make soak.
TENSORFLOW_MPI_3 = tensorflow("mpi", 3, *KERAS_OPTIMIZER, *KERAS_MONITOR, *AGREEMENT)

SIMULATED_ONE_HOST = [
    simulated(1),
    simulated(2, SLICED + TWO_STREAMS),
    simulated(3),
    simulated(4, SLICED),
]
SIMULATED_TWO_HOSTS = simulated(4, SLICED + ASYNCHRONOUS, slots=(2, 2))
ALL_SIMULATED = [
    simulated(3, SLICED, slots=(1, 2)),
    *SIMULATED_ONE_HOST,
    SIMULATED_TWO_HOSTS,
    simulated(4, GROUPS),
]

# The engine that needs no Horovod, by the core and by torch's operations; 4 ranks in make soak.
DISTRIBUTED = _files("distributed", "all_reduce hook hook_details rules")
LEVELS = _files("distributed", "levels")  # of two hosts with two ranks each
WITHOUT_CORE = (("ADASUM_HVD_CORE", "off"),)


def on_hosts(hosts: str, files: tuple[str, ...] = DISTRIBUTED) -> Configuration:
    """Return a configuration of torchrun's ranks, each on a host that it acts."""
    return Configuration(
        files, "torchrun", len(hosts), (("ADASUM_TEST_HOST_OF", hosts),)
    )


ALL_REDUCE = _files("distributed", "all_reduce")
ON_HOST_3, IN_TURN_2, IN_TURN_5 = map(on_hosts, ("000", "01", "01010"))
# As jobs of Horovod's op, for their bits.
ON_HOST_5, THEIR_HOSTS_3 = (on_hosts(h, ALL_REDUCE) for h in ("00000", "011"))
THEIR_HOSTS_4 = on_hosts("0011")

# The cases of tests/gpu on the CPU, so that one that cannot pass is seen without a device.
TENSORFLOW_DEVICE = _files("device", "tensorflow")
ON_CPU = [
    Configuration(
        _files("device", "torch"),
        "gloo",
        3,
        (("ADASUM_TEST_DEVICE", "cpu"),),
        "localhost:1,127.0.0.1:2",
    ),
    Configuration(TENSORFLOW_DEVICE, "gloo", 2, (("ADASUM_TEST_DEVICE", "CPU"),)),
    Configuration(
        _files("device", "distributed"), "torchrun", 4, (("ADASUM_TEST_DEVICE", "cpu"),)
    ),
]

# In the order in which they are likely to show a fault: `make test` runs a case on the first
# configuration that has its file (tests/tiers.py). First are three ranks, which is not a power of
# two, paths of large tensors, devices of two hosts, and the core.
CONFIGURATIONS = [
    STAGED_MPI, TINY_MPI, MPI_3, GLOO_2, MPI_4,
    GLOO_3, ALONE, MPI_2, MPI_5, PORTABLE_MPI, UNEQUAL_HOSTS, TWO_HOSTS, SPLIT_MPI, GROUPED,
    TENSORFLOW_MPI_3, TENSORFLOW_GLOO_2,
    Configuration(_files("keras", "strict_cells"), "gloo", 2),
    Configuration(_files("torch", "tutorial"), "gloo", 2),  # 16 ranks in make soak
    *(Configuration(_files("distributed", "ddp"), "torchrun", n) for n in (3, 2)),
    THEIR_HOSTS_4, ON_HOST_3, IN_TURN_2, IN_TURN_5, ON_HOST_5, THEIR_HOSTS_3,
    Configuration(
        DISTRIBUTED, "torchrun", 3, (("ADASUM_TEST_HOST_OF", "010"), *WITHOUT_CORE)
    ),
    Configuration(
        (*LEVELS, *DISTRIBUTED), "torchrun", 4, (("ADASUM_TEST_HOST_OF", "0101"), *WITHOUT_CORE)
    ),
    Configuration(SHARDED, "torchrun", 4),  # 6 in make soak
    on_hosts("0011", _files("distributed", "replicate cancelled_shards local_sgd")),
    Configuration(CANCELLED, "torchrun", 6),
    Configuration(
        _files("distributed", "replicate cancelled_shards"), "torchrun", 4, WITHOUT_CORE
    ),
    *ON_CPU,
    *(ALL_SIMULATED if platform.machine() == "x86_64" else []),
]  # fmt: skip
