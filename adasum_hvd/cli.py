"""The `adasum-hvd` command; `python -m adasum_hvd` is the same."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from adasum_hvd import __version__
from adasum_hvd.horovod.build import command as builder
from adasum_hvd.horovod.build.environment import FRAMEWORKS, BuildError
from adasum_hvd.tools import advise, bench, demo, doctor, hosts, jobs, plot, timeline
from adasum_hvd.tools import torch_checkpoint as checkpoint


def _build(arguments: argparse.Namespace) -> None:
    given = arguments.frameworks
    frameworks = None if given is None else given.split(",")
    if not set(frameworks or ()) <= set(FRAMEWORKS):
        raise BuildError(
            f"expected --frameworks torch, tensorflow or torch,tensorflow, but got {given!r}"
        )
    wheel = builder.build(
        frameworks, arguments.mpi, arguments.gpu, arguments.force, arguments.debug
    )
    if not arguments.no_install:
        builder.install(wheel)
    print(f"{'built' if arguments.no_install else 'installed'}: {wheel}")


def _exec(arguments: argparse.Namespace) -> int:
    # Needs Horovod; `build` must work without it.
    from adasum_hvd.horovod.launch import command

    return command.run(arguments.command, arguments.nprocs)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Of the parsed arguments `run` is the command, which may return an exit status; `errors` are the
    exceptions that it raises on purpose.
    """
    parser = argparse.ArgumentParser(prog="adasum-hvd", description=__doc__)
    parser.add_argument(
        "--version", action="version", version=f"adasum-hvd {__version__}"
    )
    parser.set_defaults(errors=())
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="name")

    build = commands.add_parser(
        "build",
        help="build Horovod with the AdaSum op for this environment and install it",
    )
    build.add_argument(
        "--frameworks",
        metavar="LIST",
        help="torch, tensorflow or both (default: the installed ones)",
    )
    mpi = build.add_mutually_exclusive_group()
    mpi.add_argument("--mpi", action="store_true", default=None, help="require MPI")
    mpi.add_argument("--no-mpi", dest="mpi", action="store_false", help="leave MPI out")
    build.add_argument(
        "--gpu", choices=["nccl"], help="GPU operations too; needs nvcc and pip's NCCL"
    )
    build.add_argument("--no-install", action="store_true", help="only make the wheel")
    build.add_argument("--force", action="store_true", help="do not use a cached wheel")
    build.add_argument("--debug", action="store_true", help="with debug information")
    build.set_defaults(run=_build, errors=BuildError)

    program = commands.add_parser(
        "exec",
        help="run a Horovod program as a rank of torchrun, Slurm or Kubernetes, or as --nprocs N",
    )
    program.add_argument(
        "--nprocs", type=jobs.count, metavar="N", help="start N ranks on this host"
    )
    program.add_argument("command", nargs="+", help="-- program and its arguments")
    program.set_defaults(run=_exec, errors=(RuntimeError, OSError))
    for tool in (doctor, bench, demo, plot, advise, timeline, hosts, checkpoint):
        tool.add_to(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # what it has started has ended
        return 128 + signal.SIGINT
    except arguments.errors as error:
        print(f"adasum-hvd {arguments.name}: {error}", file=sys.stderr)
        return 1
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
