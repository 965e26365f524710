"""Processes that have imported a framework, and fork the ranks of tests.

A rank's start is its imports: three or four seconds of processor time for torch, seven for
TensorFlow, in some 300 ranks. A fork has them at once. What is tested is imported by each rank
itself: neither Horovod nor this package is in a parent.

Words of `python()` take the place of `python` in front of a program. A command that starts more
Pythons itself (`adasum-hvd demo`) is started by `interpreter()`, which forks those, too.
`sys.executable` remains right where a test is about the start itself, or sets a variable that is
read before the first line of a program (a parent refuses to run a program whose variables of that
kind differ).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.parallel.harness.forked import NAMESPACES

FRAMEWORKS = {
    "torch": ("pytest", "cloudpickle", "psutil", "yaml", "torch", "torch._dynamo"),
    "tensorflow": ("pytest", "cloudpickle", "psutil", "yaml", "tensorflow", "keras"),
}
UNNEEDED = ("matplotlib", "sklearn")  # Keras imports them if they are there: 1.5 of 5 s
PARENTS = 2  # forked.py says why
# In place of a Python: modules and programs run in forks, all else (-c, -S) as usual.
INTERPRETER = """#!/bin/sh
case "$1" in
  -m | *.py) exec {python} -IS {forked} {sockets} "$@" ;;
  *) exec {python} "$@" ;;
esac
"""
EXECUTABLE = "ADASUM_TESTS_EXECUTABLE"  # the `sys.executable` of a fork
FORKED = str(Path(__file__).with_name("forked.py"))
# Read by libraries when they are loaded.
READ_AT_START = (
    "CUDA_", "GLIBC_", "KERAS_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_",
    "PYTHON", "TF_", "TORCH_LOGS",
)  # fmt: skip


def python(framework: str = "torch", parents: int = PARENTS) -> list[str]:
    """Return the words that run a program in a fork of a process with this framework."""
    return [sys.executable, "-IS", FORKED, ",".join(_parents(framework, parents))]


def run_script(script: str, *words: str, framework: str = "tensorflow") -> str:
    """Run a script in a fork of a process with this framework; return what it prints.

    Raises:
        AssertionError: it ends with an error; with the end of its output.
    """
    from tests.parallel.harness.launch import REPOSITORY, environment

    done = subprocess.run(
        [*python(framework, 1), "-c", script, *words], cwd=REPOSITORY, text=True,
        env=environment(), timeout=200, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@functools.cache
def interpreter(framework: str = "torch") -> str:
    """Return a program that stands for `sys.executable`, also in what it starts."""
    sockets = _parents(framework, PARENTS)
    program = Path(sockets[0]).with_name("python")
    words = {"python": sys.executable, "forked": FORKED, "sockets": ",".join(sockets)}
    program.write_text(INTERPRETER.format(**words))
    program.chmod(0o755)
    return str(program)


@functools.cache
def _parents(framework: str, count: int) -> list[str]:
    """Start parents, which end with this process; return their sockets' paths."""
    from tests.parallel.harness.launch import REPOSITORY, environment

    folder = tempfile.TemporaryDirectory(prefix="adasum-parents-")
    paths = [str(Path(folder.name, str(number))) for number in range(count)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.harness.imported", framework, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=environment(),
            start_new_session=True,
        )
        for path in paths
    ]

    def end() -> None:
        for process in processes:
            process.stdin.close()
            process.wait()
        folder.cleanup()

    atexit.register(end)
    for process in processes:
        if not process.stdout.readline():  # it prints a line when it is ready
            raise RuntimeError(f"{process.args}: expected a line, but it has ended")
    return paths


def main(framework: str, path: str) -> None:
    """Import a framework, and fork ranks until stdin is closed."""
    given = dict(os.environ)
    gc.disable()  # imports make 300,000 objects that stay
    sys.modules |= dict.fromkeys(UNNEEDED)
    for name in FRAMEWORKS[framework]:
        # A wheel's tests are without Horovod's needs.
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    for name in UNNEEDED:
        del sys.modules[name]
    gc.freeze()
    gc.enable()
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"expected one thread to fork, but got {len(tasks)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    if job := serve(listener):
        run(**job, given=given)


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork on request; return in a fork its job, and in the parent {} when stdin is closed."""
    selector = selectors.PollSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        key, _ = selector.select()[0]
        if key.fileobj is sys.stdin:
            return {}
        if key.fileobj is listener:
            client, _ = listener.accept()
            _, files, _, _ = socket.recv_fds(client, 1, 6)
            job = json.loads(client.makefile().readline())
            process = os.fork()
            if not process:
                for known in (*selector.get_map(), client.fileno()):
                    os.close(known)
                return job | {"streams": files[:3], "spaces": files[3:]}
            for file in files:
                os.close(file)
            client.sendall(f"{process}\n".encode())
            for end in (client, os.pidfd_open(process)):
                selector.register(end, selectors.EVENT_READ, (process, client))
            continue
        process, client = key.data
        selector.unregister(key.fileobj)
        if key.fileobj is client:  # that process has been killed
            os.kill(process, signal.SIGKILL)
            continue
        os.close(key.fd)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if client in selector.get_map():
            selector.unregister(client)
        with suppress(OSError), client:
            client.sendall(f"{status}\n".encode())


def enter(spaces: list[int]) -> None:
    """Enter the namespaces of these file descriptors, and close them."""
    setns = ctypes.CDLL(None, use_errno=True).setns  # os.setns is of Python 3.12
    for name, space in zip(NAMESPACES, spaces, strict=True):
        there, here = os.fstat(space), os.stat(f"/proc/self/ns/{name}")
        if there.st_ino != here.st_ino and setns(space, 0):
            sys.exit(f"setns: {os.strerror(ctypes.get_errno())}")
        os.close(space)


def run(
    words: list[str], folder: str, environment: dict[str, str], cores: list[int],
    streams: list[int], spaces: list[int], given: dict[str, str],
) -> None:  # fmt: skip
    """Run a program as `python WORDS` would, with these standard streams.

    Args:
        words: of the program.
        folder: to work in.
        environment: the program's.
        cores: to run on; `mpirun` binds ranks to them.
        streams: file descriptors that become 0, 1 and 2.
        spaces: file descriptors of the namespaces to run in.
        given: the parent's environment before its imports, some of which add variables.
    """
    # No session of its own: where Linux schedules by session, a rank that waits in MPI's loop of
    # sched_yield() would not yield to ranks of others.
    os.setpgid(0, 0)
    os.sched_setaffinity(0, cores)
    enter(spaces)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    if differing := [
        name
        for name in given | environment
        if name.startswith(READ_AT_START) and given.get(name) != environment.get(name)
    ]:
        sys.exit(
            f"{words[:2]}: expected the tests' own {', '.join(differing)}, which libraries read "
            "when they are loaded, but got others; start this program with sys.executable"
        )
    added = {name: v for name, v in os.environ.items() if name not in given}
    os.environ.clear()
    os.environ.update(added | environment)
    sys.executable = environment.get(EXECUTABLE, sys.executable)
    sys.modules["numpy"].random.seed()  # else all forks have the parent's state
    if torch := sys.modules.get("torch"):
        torch.seed()
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = folder
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = folder
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
