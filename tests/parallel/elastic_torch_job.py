"""An elastic job as tests start it: trains, comes upon faults, and writes down what it does.

    elastic_torch_job.py PLAN.json

The plan: `op`, `local_steps`, `epochs`, `commit` (steps between commits); `log`, a file of JSON
lines; `hosts`, what the discovery script shows from a step on, and its `file`; `faults`, by step:
what the rank on a host does. A fault happens once.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

import adasum_hvd.torch as hvd

SAMPLES, BATCH = 96, 4
STUCK_SECONDS = 60
PLAN = json.loads(Path(sys.argv[1]).read_text())
LOG = Path(PLAN["log"])

hvd.init()
HOST = os.environ["HOROVOD_HOSTNAME"]
torch.manual_seed(hvd.rank())  # the first synchronization makes replicas equal
images = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
labels = torch.arange(SAMPLES) % 3
model = torch.nn.Sequential(
    torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    model.named_parameters(),
    op=PLAN["op"],
    **({"local_steps": PLAN["local_steps"]} if "local_steps" in PLAN else {}),
)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=True)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)


def write(**line: object) -> None:
    line |= {"rank": hvd.rank(), "size": hvd.size(), "worker": os.getpid()}
    with LOG.open("a") as file:
        file.write(json.dumps(line) + "\n")


def digest() -> str:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def once(name: str) -> bool:
    """Return whether nobody has asked for this before."""
    try:
        LOG.with_name(f"done-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def come_upon_faults(step: int, phase: str) -> None:
    faulthandler.dump_traceback_later(STUCK_SECONDS)  # shows where a rank stands
    hosts = PLAN.get("hosts", {}).get(str(step))
    if hosts and phase == "forward" and hvd.rank() == 0 and once(f"hosts-{step}"):
        Path(PLAN["file"]).write_text(hosts)
        told_by = time.monotonic() + 60
        while state._host_messages.empty():  # the driver looks once a second
            assert time.monotonic() < told_by, "the driver does not tell of new hosts"
            time.sleep(0.05)
    fault = PLAN.get("faults", {}).get(str(step))
    if fault and fault["host"] == HOST and fault["phase"] == phase:
        if not once(f"fault-{step}"):
            return
        if fault["kind"] == "exception":
            raise RuntimeError("a fault of the plan")
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    write(start=state.step, weights=digest())
    while state.epoch < PLAN["epochs"]:
        order = list(state.sampler)
        for position in range(0, len(order), BATCH):
            chosen = order[position : position + BATCH]
            come_upon_faults(state.step, "forward")
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            come_upon_faults(state.step, "reduction")
            optimizer.step()
            state.sampler.record_batch(position // BATCH, len(chosen))
            write(
                step=state.step, epoch=state.epoch, samples=chosen, weights=digest(),
                loss=loss.item(),
            )  # fmt: skip
            state.step += 1
            if state.step % PLAN["commit"] == 0:
                state.commit()
            else:
                state.check_host_updates()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    write(end=state.step, weights=digest())


train(state)
