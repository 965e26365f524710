"""A rank's process as its launcher sees it: `imported.py` forks what it stands for.

    python -IS forked.py SOCKET,SOCKET [-m MODULE | PROGRAM] [ARGUMENT ...]

It hands its environment, folder, cores, standard streams and namespaces to a parent that has
imported the frameworks, passes signals on, and ends as the fork ends. If it is killed, so is the
fork. Ranks take the parents in turn, because forks of one parent have its order of sets and its
addresses.
It imports as little as it can: with its own start, a rank takes a tenth of a second.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
NAMESPACES = ("net", "uts", "mnt")  # those of tests/hosts; folders last
RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")  # by launcher


def main(sockets: list[str], words: list[str]) -> None:
    """Have a parent run the program, and end as it ends."""
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    parent = socket.socket(socket.AF_UNIX)
    parent.connect(sockets[int(rank) % len(sockets)])
    job = {
        "words": words,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "cores": list(os.sched_getaffinity(0)),
    }
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    socket.send_fds(parent, [b" "], [0, 1, 2, *spaces])
    parent.sendall(json.dumps(job).encode() + b"\n")
    reader = parent.makefile()
    if not (process := reader.readline()):
        sys.exit("expected a fork's process id, but its parent has ended")
    for number in FORWARDED:
        signal.signal(number, lambda got, _: os.kill(int(process), got))
    if not (status := reader.readline()):
        sys.exit(f"expected the status of process {process}, but its parent has ended")
    if int(status) < 0:
        with suppress(OSError):  # SIGKILL always has its default
            signal.signal(-int(status), signal.SIG_DFL)
        os.kill(os.getpid(), -int(status))
    os._exit(int(status))


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
