"""One replica of a fault-tolerant job: torchft with AdaSum. Start several; each may die and rejoin.

    pip install '.[torchft]'
    torchft_lighthouse --min_replicas 2 --bind 0.0.0.0:29510
    python examples/torch_torchft.py --lighthouse http://HOST:29510 --replica 0   # and 1, and 2

`--algorithm diloco` and `local-sgd` take 5 local steps between two reductions.
"""

from __future__ import annotations

import argparse
import hashlib
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from torch import nn
from torch.nn import functional

from adasum_hvd.distributed.torchft import ManagedAdasum, diloco, local_sgd

WAIT = timedelta(seconds=60)


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, and the largest of four linear functions of each."""
    inputs = torch.randn(32, 16, generator=generator)
    teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(9))
    return inputs, (inputs @ teacher).argmax(1)


def local_steps(
    algorithm: str,
    adasum: ManagedAdasum,
    model: nn.Module,
    inner: torch.optim.Optimizer,
) -> AbstractContextManager:
    """Return a context in which every fifth step of `inner` ends with a reduction, if any does."""
    if algorithm == "diloco":
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.5, nesterov=True)
        return diloco(adasum, [model], inner, outer, 5)
    if algorithm == "local-sgd":
        return local_sgd(adasum, model, inner, 5)
    return nullcontext()


def train(arguments: argparse.Namespace) -> None:
    """Run one replica, until all replicas were in enough steps."""
    name = f"replica {arguments.replica}"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    plain = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    progress = {"complete": 0}  # steps in which all replicas were; recovered, too

    def load(state: tuple[dict, dict, dict]) -> None:
        model.load_state_dict(state[0])
        plain.load_state_dict(state[1])
        progress.update(state[2])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gradients = arguments.algorithm == "gradients"
    group = torchft.ProcessGroupGloo(timeout=WAIT)
    manager = torchft.Manager(
        pg=group, min_replica_size=2, use_async_quorum=gradients, timeout=WAIT,
        load_state_dict=load, state_dict=lambda: (model.state_dict(), plain.state_dict(), progress),
        replica_id=f"replica{arguments.replica}", lighthouse_addr=arguments.lighthouse,
        store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1,
    )  # fmt: skip
    adasum = ManagedAdasum(manager, group)
    optimizer = torchft.Optimizer(manager, plain) if gradients else plain
    generator = torch.Generator().manual_seed(arguments.replica)
    step, count, before = 0, 0, 0
    with local_steps(arguments.algorithm, adasum, model, plain):
        while progress["complete"] < arguments.steps:
            inputs, targets = batch(generator)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            if gradients:
                adasum.reduce_gradients(model)
            optimizer.step()
            if manager.current_step() > step:
                step, count = manager.current_step(), manager.num_participants()
                progress["complete"] += count == arguments.replicas
            if count != before:
                print(f"{name}: step {step}, {count} replicas", flush=True)
                before = count
    inputs, targets = batch(torch.Generator().manual_seed(99))
    accuracy = (model(inputs).argmax(1) == targets).float().mean()
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    weights = hashlib.sha256(bits).hexdigest()[:12]
    print(f"{name}: ends at step {step}, weights {weights}, accuracy {accuracy:.2f}")
    manager.shutdown()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    algorithms = ["gradients", "diloco", "local-sgd"]
    parser.add_argument("--algorithm", default="gradients", choices=algorithms)
    parser.add_argument("--steps", type=int, default=40, help="with all replicas")
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--lighthouse", required=True, help="address of the quorum")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
