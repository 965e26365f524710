"""Hosts on one machine: a network namespace, a name and a hosts file each, joined by shaped links.

Every host is a process that sleeps in namespaces of its own; a switch (a bridge, or
`delay_line.py`) is one more. All of it, links included, is gone when these processes are.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

INTERFACE = "eth0"
# ssh's words without sshd: the options are skipped, the rest runs inside the host's namespaces.
REMOTE_SHELL = """#!/bin/sh
options() {
  while :; do
    case $1 in
      -o | -p | -i) shift 2 ;;
      -*) shift ;;
      *) break ;;
    esac
  done
  words="$*"
}
options "$@"
host=${words%% *}
options ${words#* }
pid=$(cat "$(dirname "$0")/$host")
exec nsenter --target "$pid" --net --uts --mount --wd="$PWD" -- sh -c "$words"
"""


def address(number: int) -> str:
    """Return the address of a host, which are numbered from 1."""
    return f"10.77.0.{number}"


def missing() -> str:
    """Return why this machine cannot have such hosts, or ""."""
    probe = ["unshare", "--net", "--uts", "--mount"]
    probe += ["ip", "link", "add", "name", "adasum0", "type", "veth"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return f"expected unshare (util-linux), but got {error}"
    if done.returncode:
        return f"expected root and ip (iproute2), but got: {done.stderr.strip()}"
    return ""


class Hosts:
    """Hosts `adasum1` ... `adasumN` for the length of a `with`.

    Args:
        count: how many.
        gigabits: what each link carries per second in each direction.
        delay: milliseconds from one host to another.

    Congestion control is reno, which every namespace may choose.
    """

    def __init__(self, count: int, gigabits: float = 1.0, delay: float = 0.0) -> None:
        self.names = [f"adasum{k}" for k in range(1, count + 1)]
        self.gigabits = gigabits
        self.delay = delay
        self._processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Hosts:
        self._directory = tempfile.TemporaryDirectory(prefix="adasum-hosts-")
        self.tools = Path(self._directory.name)
        shell = self.tools / "ssh"
        shell.write_text(REMOTE_SHELL)
        shell.chmod(0o755)
        addresses = [f"{address(k)} {name}" for k, name in enumerate(self.names, 1)]
        (self.tools / "hosts").write_text(
            "\n".join(["127.0.0.1 localhost", *addresses, ""])
        )
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        for name in ("switch", *self.names):
            self._processes[name] = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sleep", "infinity"],
                stdin=subprocess.DEVNULL,
            )
        for name, process in self._processes.items():
            _wait_for_namespaces(process)
            (self.tools / name).write_text(str(process.pid))
        (self._delay_line if self.delay else self._bridge)()
        for k, name in enumerate(self.names, 1):
            self.run(name, f"hostname {name}")
            self.run(name, f"mount --bind {self.tools}/hosts /etc/hosts")
            self.run(name, "ip link set dev lo up")
            self.run(name, f"ip address add {address(k)}/24 dev {INTERFACE}")
            self.run(name, f"ip link set dev {INTERFACE} up")
            self.run(name, "sysctl -qw net.ipv4.tcp_congestion_control=reno")
            self._shape(name, INTERFACE)

    def _bridge(self) -> None:
        self.run("switch", "ip link add name bridge0 type bridge")
        self.run("switch", "ip link set dev bridge0 up")
        for k, name in enumerate(self.names, 1):
            pid = self._processes[name].pid
            self.run("switch", f"ip link add name port{k} type veth peer name {name}")
            self.run("switch", f"ip link set dev {name} netns {pid} name {INTERFACE}")
            self.run("switch", f"ip link set dev port{k} master bridge0 up")
            self._shape("switch", f"port{k}")

    def _delay_line(self) -> None:
        words = [sys.executable, str(Path(__file__).with_name("delay_line.py"))]
        words += [str(self.delay / 1e3), str(self.gigabits * 1e9 / 8), INTERFACE]
        words += [str(self._processes[name].pid) for name in self.names]
        line = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self._processes["delay line"] = line
        if line.stdout.readline() != "ready\n":
            raise RuntimeError(f"{words} ended with {line.wait()}")

    def _shape(self, host: str, interface: str) -> None:
        shape = f"tbf rate {self.gigabits}gbit burst 128kb limit 2mb"
        self.run(host, f"tc qdisc add dev {interface} root {shape}")

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._directory.cleanup()

    def enter(self, host: str) -> list[str]:
        """Return the words in front of a command that make it run on a host."""
        pid = str(self._processes[host].pid)
        return ["nsenter", "--target", pid, "--net", "--uts", "--mount", "--"]

    def offload(self, on: bool) -> None:
        """Let links carry unsegmented packets (fast), or only what fits a cable (all headers)."""
        for name in self.names:
            segments = 44 if on else 1
            self.run(name, f"ip link set dev {INTERFACE} gso_max_segs {segments}")

    def run(self, host: str, command: str) -> str:
        """Run a command on a host (or "switch") and return what it printed.

        Raises:
            RuntimeError: it failed; with its output.
        """
        done = subprocess.run(
            [*self.enter(host), *command.split()],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{host}: {command}: {done.stderr.strip()}")
        return done.stdout


def _wait_for_namespaces(process: subprocess.Popen) -> None:
    """Return as soon as unshare has made the namespaces, private mounts too, and sleeps."""
    while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
        if process.poll() is not None:
            raise RuntimeError(f"unshare ended with {process.returncode}; needs root")
        time.sleep(0.001)


def sent() -> tuple[int, int, int]:
    """Return (bytes, packets, segments that TCP sent again) of this process's host so far."""
    with open("/proc/net/dev") as table:
        line = next(line for line in table if line.strip().startswith(f"{INTERFACE}:"))
    fields = line.split(":")[1].split()
    with open("/proc/net/snmp") as table:
        names, counts = (line.split() for line in table if line.startswith("Tcp:"))
    again = counts[names.index("RetransSegs")]
    return int(fields[8]), int(fields[9]), int(again)
