"""The program of a rank in `adasum-hvd demo`: LeNet-5 on scikit-learn's handwritten digits.

python -m adasum_hvd.tools.torch_digits horovod|torch EPOCHS OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from adasum_hvd.base.replicas import ReplicaMismatch
from adasum_hvd.monitor import files
from adasum_hvd.tools import plot

OPS = ("sum", "average", "adasum-grad", "adasum-delta")
WATCHED, RECORDS = "adasum-grad", "demo-monitor.jsonl"  # of hvd.AdasumMonitor
EVERY = 2  # steps between two records of the monitor
Trained = tuple[nn.Module, Any, Any]
Records = Path | None
BATCH_SIZE = 32  # images per rank and step
RATE = 0.03  # the best for one process (docs/convergence.md), and not scaled
SEED = 42
TARGET_ACCURACY = 0.95


class LeNet5(nn.Module):
    """LeNet-5 for 32 x 32 single-channel images (LeCun et al. 1998), ReLU and max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, 10) for images of shape (batch, 1, 32, 32)."""
        x = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return self.fc3(functional.relu(self.fc2(x)))


class Engine(NamedTuple):
    """The ranks of a job, and how they reduce. All functions are collective."""

    rank: int
    size: int
    local: tuple[int, int]  # this rank's number on its host, and of how many
    # Of a model, an optimizer, an op's name and a monitor's file or None. Returns the model and the
    # optimizer with that reduction, and the monitor or None.
    train: Callable[[nn.Module, Any, str, Records], Trained]
    check_replicas: Callable[[nn.Module], bool]
    shut_down: Callable[[], None]


def horovod() -> Engine:
    """Return Horovod's op with `DistributedOptimizer`. Collective."""
    import adasum_hvd.torch as hvd

    def train(model: nn.Module, optimizer: Any, op: str, records: Records) -> Trained:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
        return model, wrapped, records and hvd.AdasumMonitor(wrapped, EVERY, records)

    hvd.init()
    ranks = hvd.rank(), hvd.size(), (hvd.local_rank(), hvd.local_size())
    return Engine(*ranks, train, hvd.check_replicas, hvd.shutdown)


def torch_distributed() -> Engine:
    """Return `adasum_hvd.distributed`: DDP with a hook, under torchrun. Collective."""
    import torch.distributed as dist

    from adasum_hvd import distributed

    def train(model: nn.Module, optimizer: Any, op: str, records: Records) -> Trained:
        if op == "adasum-delta":
            distributed.reduce_changes(optimizer)
            return model, optimizer, None
        rules: dict[str, Any] = {
            # A function of Gram matrices: the coefficients of a plain sum.
            "sum": lambda gram: torch.ones_like(gram[:, 0]),
            "average": "mean",
            "adasum-grad": "adasum",
        }
        state = distributed.AdasumState(rule=rules[op])
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(state, distributed.adasum_hook)
        watched = state, EVERY, records, model.named_parameters()
        return ddp, optimizer, records and distributed.AdasumMonitor(*watched)

    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    ranks = dist.get_rank(), dist.get_world_size(), local
    return Engine(*ranks, train, distributed.check_replicas, dist.destroy_process_group)


ENGINES = {"horovod": horovod, "torch": torch_distributed}


@dataclass
class Result:
    """One training run."""

    op: str
    accuracy: float = 0.0
    steps_to_target: int | None = None
    seconds: float = 0.0
    identical: bool = False
    curve: list[tuple[int, float]] = field(default_factory=list)


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return train images, train labels, test images and test labels: 1437 and 360 digits."""
    # Its file is read directly, because ranks that import scikit-learn take seconds.
    package = metadata.distribution("scikit-learn")
    path = str(package.locate_file("sklearn/datasets/data/digits.csv.gz"))
    table = torch.from_numpy(np.loadtxt(path, np.float32, delimiter=","))
    images = table[:, :-1].view(-1, 1, 8, 8) / 16 - 0.5
    images = functional.interpolate(images, size=(32, 32), mode="bilinear")
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    train, test = order[:1437], order[1437:]
    labels = table[:, -1].long()
    return images[train], labels[train], images[test], labels[test]


def device_of(chosen: str, local_rank: int, local_size: int) -> torch.device:
    """Return this rank's device: for "auto" CUDA if every rank of the host has one."""
    devices = torch.cuda.device_count()
    if chosen == "cpu" or (chosen == "auto" and devices < local_size):
        return torch.device("cpu")
    if not devices:
        raise RuntimeError(
            "--device cuda: expected a CUDA device, but got none; use cpu"
        )
    device = torch.device("cuda", local_rank % devices)
    torch.cuda.set_device(device)
    return device


def train(engine: Engine, op: str, epochs: int, output: Path) -> Result:
    """Train one model with reduction `op` and return what came out; accuracies on rank 0 only."""
    device = device_of("auto", *engine.local)
    train_images, train_labels, test_images, test_labels = (
        tensor.to(device) for tensor in digits()
    )
    torch.manual_seed(SEED)
    model = LeNet5().to(device)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    records = output / RECORDS if op == WATCHED else None
    if records is not None:
        records.unlink(missing_ok=True)
        records.with_suffix(".png").unlink(missing_ok=True)
    reduced, optimizer, monitor = engine.train(model, optimizer, op, records)
    per_epoch = len(train_images) // (BATCH_SIZE * engine.size)
    steps = per_epoch * epochs
    every = max(1, steps // 30)
    result = Result(op)
    started = time.perf_counter()
    for step in range(steps):
        epoch, index = divmod(step, per_epoch)
        if index == 0:
            order = np.random.default_rng([SEED, epoch])
            shuffled = torch.from_numpy(order.permutation(len(train_images)))
        first = (index * engine.size + engine.rank) * BATCH_SIZE
        mine = shuffled[first : first + BATCH_SIZE]
        optimizer.zero_grad()
        logits = reduced(train_images[mine])
        functional.cross_entropy(logits, train_labels[mine]).backward()
        optimizer.step()
        if engine.rank == 0 and ((step + 1) % every == 0 or step + 1 == steps):
            with torch.no_grad():
                hits = model(test_images).argmax(1) == test_labels
            result.accuracy = hits.float().mean().item()
            result.curve.append((step + 1, result.accuracy))
            if result.steps_to_target is None and result.accuracy >= TARGET_ACCURACY:
                result.steps_to_target = step + 1
    if monitor is not None:
        monitor.close()
    result.seconds = time.perf_counter() - started
    with suppress(ReplicaMismatch):
        result.identical = engine.check_replicas(model)
    return result


def report(results: list[Result], output: Path, ranks: int) -> None:
    """Print the table and, where matplotlib is installed, draw accuracy over steps."""
    percent = f"{TARGET_ACCURACY:.0%}"
    print(f"{'reduction':14s} {'test accuracy':>13s} {'steps to ' + percent:>13s} "
          f"{'seconds':>8s}  replicas identical")  # fmt: skip
    for result in results:
        print(
            f"{result.op:14s} {result.accuracy:13.3f} {result.steps_to_target or 'never':>13} "
            f"{result.seconds:8.1f}  {'yes' if result.identical else 'NO'}"
        )
    table = output / "demo.json"
    table.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if (figure := plot.new_figure(figsize=(8, 5))) is None:
        print(f"\nresults: {table} (no picture: matplotlib is not installed)")
        return
    axes = figure.subplots()
    for result in results:
        axes.plot(*zip(*result.curve, strict=True), label=result.op)
    axes.axhline(TARGET_ACCURACY, color="grey", linewidth=0.8, linestyle=":")
    title = f"LeNet-5 on digits, {ranks} ranks, one learning rate"
    axes.set(xlabel="step", ylabel="test accuracy", title=title)
    axes.legend()
    figure.savefig(output / "demo.png", dpi=120)
    print(f"\nresults: {table}\npicture: {output / 'demo.png'}")
    if ranks > 1:
        drawn = output / RECORDS
        plot.draw(files.records(drawn), drawn.with_suffix(".png"))
        print(f"monitor: {drawn}\npicture: {drawn.with_suffix('.png')}")


def main() -> None:
    """Train with every reduction; rank 0 reports."""
    engine, epochs, output = ENGINES[sys.argv[1]](), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    results = [train(engine, op, epochs, output) for op in OPS]
    if engine.rank == 0:
        report(results, output, engine.size)
    engine.shut_down()
    if not all(result.identical for result in results):
        sys.exit("replicas differ")


if __name__ == "__main__":
    main()
