"""The common part of elastic test jobs: a plan of faults, and a log of events.

    elastic_torch_job.py PLAN.json, elastic_keras_job.py PLAN.json

The plan: `op`, `local_steps`, `epochs`, `commit` (steps between commits), `hidden` (width of the
model); `log`, a file of JSON lines; `hosts`, what the discovery script shows from a step on, and
its `file`; `faults`, by step: what the ranks of a `host` do, or the one of a `rank`, an
"exception", a "kill" or a "cut", for which they wait, and in which `phase`: "negotiation", before
they send anything of the step, or "exchange" or "gather", in the middle of a reduction; `late`: the
first rank on a `host` sleeps for some `seconds` before it comes to the others, or dies by a "kill".
Each fault happens once.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES, BATCH = 96, 4
STUCK_SECONDS = 60


class Plan:
    """A job's plan, and its log; `hvd` is the framework's module."""

    def __init__(self, hvd: Any):
        self.hvd = hvd
        self.entries = json.loads(Path(sys.argv[1]).read_text())
        self.log = Path(self.entries["log"])
        self.place = os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"]

    def __getitem__(self, name: str) -> Any:
        return self.entries[name]

    @property
    def hidden(self) -> int:
        return self.entries.get("hidden", 20)

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of `DistributedOptimizer`."""
        names = ("op", "local_steps", "backward_passes_per_step")
        return {name: self[name] for name in names if name in self.entries}

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what all ranks train on: features and classes that they tell."""
        features = np.random.RandomState(1).standard_normal((SAMPLES, 6))
        return features.astype(np.float32), features[:, :3].argmax(1)

    def arrive(self) -> None:
        """Come late, or not at all, where the plan has that for this host. Before `init`."""
        late = self.entries.get("late", {})
        if late.get("host") == self.place[0] and self.once("late"):
            if late["kind"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(late["seconds"])

    def begin(self, step: int, weights: str) -> None:
        """Write down a start, and that what follows belongs to it. Collective."""
        self.round = self.hvd.allgather_object(time.time_ns())[0]
        self.write(start=step, weights=weights)

    def write(self, **line: object) -> None:
        """Write down what this rank has come to."""
        line |= {"round": self.round, "rank": self.hvd.rank(), "size": self.hvd.size()}
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def once(self, name: str) -> bool:
        """Return whether nobody has asked for this before."""
        try:
            self.log.with_name(f"done-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def come_upon(self, state: Any, step: int) -> None:
        """Do what the plan has for this step; nothing of it has been sent."""
        faulthandler.dump_traceback_later(STUCK_SECONDS)  # shows where a rank stands
        hosts = self.entries.get("hosts", {}).get(str(step))
        if hosts and self.hvd.rank() == 0 and self.once(f"hosts-{step}"):
            Path(self["file"]).write_text(hosts)
            deadline = time.monotonic() + 60
            while state._host_messages.empty():  # the driver looks once a second
                assert time.monotonic() < deadline, (
                    "the driver has not reported the hosts"
                )
                time.sleep(0.05)
        fault = self.entries.get("faults", {}).get(str(step))
        host, slot = self.place
        here = {"host": host, "rank": self.hvd.rank()}
        if fault and fault.items() & here.items() and self.once(f"fault-{step}-{slot}"):
            self._fail(fault["kind"], fault["phase"])

    def _fail(self, kind: str, phase: str) -> None:
        if kind == "exception":
            raise RuntimeError("a fault of the plan")
        if kind == "cut":
            while not self.log.with_name("cut").exists():
                time.sleep(0.05)
            return
        if phase == "negotiation":
            os.kill(os.getpid(), signal.SIGKILL)
        # Calls are counted when data begins to move; times are, when a phase ends.
        counter = {"exchange": "calls", "gather": "coefficients_nanoseconds"}[phase]
        before = getattr(self.hvd.counters(), counter)

        def wait_and_die() -> None:
            while getattr(self.hvd.counters(), counter) == before:
                time.sleep(0.0001)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait_and_die, daemon=True).start()


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Return a name for weights of exactly these bits."""
    content = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return hashlib.sha256(content).hexdigest()[:16]
