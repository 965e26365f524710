"""Runs a benchmark's own file as a job of several ranks, on this machine or on its namespaces."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from namespaces import INTERFACE, Hosts

from adasum_hvd.tools.bench import ratio as ratio
from adasum_hvd.tools.jobs import OF_RANKS as OF_RANKS
from adasum_hvd.tools.jobs import launcher as local_launcher
from adasum_hvd.tools.jobs import output_of, result_of

REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
HOROVODRUN = [sys.executable, str(Path(__file__).with_name("run_ranks.py"))]
LIMIT_SECONDS = 1800
PACKAGES = ("torch", "tensorflow", "tensorflow-cpu", "horovod", "adasum-hvd")


def launcher(
    backend: str, ranks: int, hosts: Hosts | None = None, slots: Sequence[int] = ()
) -> list[str]:
    """Return the words in front of the program's: of horovodrun, not exec, for "gloo".

    With `hosts`, ranks are spread evenly, or `slots` says how many each host has.
    """
    if not hosts and backend != "gloo":  # "exec" is on this machine, in one session
        return local_launcher("gloo" if backend == "exec" else backend, ranks)
    words = [*HOROVODRUN, "--gloo"] if backend == "gloo" else [str(BIN / "mpirun")]
    words += ["-np", str(ranks)]
    if not hosts:
        return words
    slots = slots or [ranks // len(hosts.names)] * len(hosts.names)
    places = zip(hosts.names, slots, strict=True)
    words += ["-H", ",".join(f"{name}:{each}" for name, each in places)]
    if backend == "gloo":
        words += ["--network-interfaces", INTERFACE]
    else:
        words += ["--prtemca", "plm_ssh_agent", str(hosts.tools / "ssh")]
        words += ["--mca", "btl_tcp_if_include", INTERFACE]
        # No host knows that the others have the same processors, and Open MPI's ranks spin. In
        # sessions of their own, hosts whose ranks yield starve others (Linux 6.18, autogroups).
        words += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        words += ["--leave-session-attached"]
    return [*hosts.enter(hosts.names[0]), *words]


def search_path(hosts: Hosts | None = None) -> str:
    """Return PATH for a job: with `hosts`, their remote shell stands in for ssh."""
    tools = [str(hosts.tools)] if hosts else []
    return os.pathsep.join([*tools, str(BIN), os.environ["PATH"]])


def run(
    backend: str,
    ranks: int,
    script: str,
    *arguments: object,
    hosts: Hosts | None = None,
    **variables: str,
) -> Any:
    """Run `script --rank ARGUMENTS OUTPUT` on every rank; return what rank 0 wrote as JSON.

    Args:
        backend: "gloo", "mpi" or "exec".
        ranks: how many processes.
        script: the file to run.
        *arguments: come in front of the path that rank 0 writes to.
        hosts: where the ranks run, the same number on each; this machine without it.
        **variables: additional environment variables.

    Raises:
        JobError: the job wrote nothing; with the end of its output.
    """
    environment = {
        **os.environ,
        "PATH": search_path(hosts),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        **OF_RANKS,
        **variables,
    }
    words = [*launcher(backend, ranks, hosts), sys.executable, script, "--rank"]
    return result_of([*words, *map(str, arguments)], environment, LIMIT_SECONDS)


def slowest(times: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return by name, for every repetition, the time of the rank that took longest.

    Args:
        times: of every rank, by name, a time for each repetition.
    """
    return {
        name: [max(of) for of in zip(*(rank[name] for rank in times), strict=True)]
        for name in times[0]
    }


def save(rows: Sequence[Any], output: Path) -> None:
    """Write what was measured, and on which machine, as JSON."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": machine(), "rows": rows}))
    print(f"results: {output}")


def machine() -> dict[str, Any]:
    """Return what a reader needs to know about where figures come from."""
    models = _lines(Path("/proc/cpuinfo"), "model name")
    drivers = Path("/proc/driver/nvidia/gpus").glob("*/information")
    found = metadata.distributions()
    installed = {one.name.lower().replace("_", "-"): one.version for one in found}
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": [name for path in drivers for name in _lines(path, "Model")],
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: installed[name] for name in PACKAGES if name in installed},
    }


def _lines(path: Path, name: str) -> list[str]:
    """Return the values of the lines `name: value` of a file in /proc."""
    return re.findall(rf"^{name}\s*:\s*(.*?)\s*$", path.read_text(), re.MULTILINE)


def run_launcher(
    words: list[str], variables: dict[str, str], timeout: float
) -> tuple[int, str]:
    """Run a launcher in a session of its own, and return its exit status and output.

    All of it is ended when it outlasts `timeout` seconds or is interrupted.
    """
    return output_of(words, variables, timeout, REPOSITORY)
