"""`adasum-hvd doctor`: explain an installation, reduce with it, and name the fixes."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from adasum_hvd.horovod.build import environment, findings
from adasum_hvd.horovod.build.findings import BUILD, DoctorFinding, State
from adasum_hvd.horovod.launch import launchers
from adasum_hvd.horovod.launch.launch_context import LaunchError
from adasum_hvd.horovod.preflight import has_mpi
from adasum_hvd.tools import jobs, machine, selfcheck

RANKS = 2
_SECONDS = 300  # ends a job that hangs; others take a few seconds


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "doctor",
        help="explain this installation and the parts it lacks, and reduce with it",
    )
    parser.add_argument(
        "--hosts",
        default="",
        metavar="A,B",
        help="other hosts of the job, checked over ssh",
    )
    parser.add_argument("--no-reduce", action="store_true", help="do not start ranks")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings and return the exit status."""
    hosts = [host for host in arguments.hosts.split(",") if host]
    found = examine(hosts, not arguments.no_reduce)
    columns = shutil.get_terminal_size().columns
    print(as_json(found) if arguments.json else table(found, columns))
    return int(status(found))


def examine(hosts: Sequence[str] = (), reduce: bool = True) -> list[DoctorFinding]:
    """Return all findings: with those of other hosts, over ssh, and those of ranks that reduce."""
    found = [*findings.installed(), *machine.findings(hosts), launcher()]
    if reduce and (frameworks := findings.with_op()):
        found += reductions(frameworks)
    if reduce and "torch" in environment.installed_frameworks():
        found.append(distributed())
    return found


def launcher() -> DoctorFinding:
    """Return the launcher by whose variables this process is a rank of a job."""
    try:
        seen = launchers.innermost(os.environ)
    except LaunchError as error:
        found, _, fix = str(error).partition("; ")
        return DoctorFinding("launcher", found, State.BROKEN, fix)
    if seen is None:
        return DoctorFinding("launcher", "none has started this process")
    shown = functools.partial(launchers.name_with_numbers, environment=os.environ)
    nested = map(shown, (seen.launcher, *seen.outer))
    return DoctorFinding("launcher", ", inside ".join(nested))


def distributed() -> DoctorFinding:
    """Return whether the engine on torch.distributed reduces to the right numbers."""
    name = "torch.distributed"
    result = _try("torchrun", name)
    judged = _judged(name, "torch", result, "reinstall torch")
    by = f"; CUDA tensors by {result['cuda']}" if "cuda" in result else ""
    return judged._replace(found=judged.found + by)


def reductions(frameworks: Sequence[str]) -> Iterator[DoctorFinding]:
    """Yield, by backend and framework, whether ranks of this host reduce to the right numbers."""
    backends = ["gloo"]
    if environment.detect_mpi() and has_mpi(frameworks[0]):
        backends.append("mpi")
    seen: dict[str, selfcheck.Report] = {}
    for backend in backends:
        for framework in frameworks:
            result = _try(backend, framework)
            yield _judged(backend, framework, result)
            if "error" not in result:
                seen.setdefault(framework, result)
    for framework, result in seen.items():
        yield from _paths(framework, result)


def _try(backend: str, framework: str) -> selfcheck.Report:
    """Return the report of a job, or {"error": ...}."""
    program, variables = "adasum_hvd.tools.selfcheck", {"HOROVOD_CONTROLLER": backend}
    try:
        return jobs.run(backend, RANKS, program, [framework], _SECONDS, variables)
    except jobs.JobError as error:
        return {"error": str(error)}


def _judged(
    backend: str, framework: str, result: dict[str, Any], repair: str = ""
) -> DoctorFinding:
    subject = f"AdaSum, {framework} on {backend}"
    if "error" in result:
        fix = repair or f"{BUILD} --frameworks {framework}"
        return DoctorFinding(subject, result["error"], State.BROKEN, fix)
    if result["wrong"]:
        found = f"{len(result['wrong'])} of {result['tried']} wrong: {', '.join(result['wrong'])}"
        fix = "report this with the output of `adasum-hvd doctor --json`"
        return DoctorFinding(subject, found, State.WRONG, fix)
    count, ranks = result["tried"], result["ranks"]
    found = f"{count} tensors over {ranks} ranks equal the reference"
    return DoctorFinding(subject, found)


def _paths(framework: str, result: dict[str, Any]) -> Iterator[DoctorFinding]:
    settings = result["settings"]
    yield DoctorFinding(
        f"op for {framework}",
        f"version {result['version']} on {' and '.join(result['built'])}; between ranks of "
        f"this host: {result['path']}; groups by {settings['group_op']}; "
        f"{settings['kernels']} kernels",
    )
    if machine.devices() and "nccl" not in result["built"]:
        found = "this Horovod has no NCCL: tensors of the devices go through the host"
        fix = f"{BUILD} --gpu nccl"
        yield DoctorFinding(f"CUDA for {framework}", found, fix=fix)


def status(found: Sequence[DoctorFinding]) -> State:
    """Return the worst state."""
    return max((finding.state for finding in found), default=State.FINE)


def table(found: Sequence[DoctorFinding], columns: int) -> str:
    """Return the findings as lines of at most so many columns."""
    width = max(len(finding.subject) for finding in found)
    wrap = functools.partial(textwrap.wrap, width=columns, break_on_hyphens=False)
    lines = []
    for finding in found:
        word = finding.state.name if finding.state else "ok"
        head = f"{word:8s}{finding.subject:{width}s}  "
        indent = " " * len(head)
        lines += wrap(head + finding.found, subsequent_indent=indent)
        if finding.fix:
            lines += wrap(f"{indent}-> {finding.fix}", subsequent_indent=f"{indent}   ")
    return "\n".join(lines)


def as_json(found: Sequence[DoctorFinding]) -> str:
    """Return the findings as JSON: status, and a list of what was found."""
    listed = [
        {**finding._asdict(), "state": finding.state.name.lower()} for finding in found
    ]
    return json.dumps({"status": int(status(found)), "findings": listed}, indent=1)
