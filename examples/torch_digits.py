"""Train LeNet-5 on scikit-learn's handwritten digits with Horovod, one process per rank.

    horovodrun -np 4 python examples/torch_digits.py --op adasum-grad

The learning rate is the one that is best for a single process and is not retuned: up to 32
ranks AdaSum of gradients needs no other (docs/convergence.md). `--op` takes average, sum,
adasum-grad, adasum-delta, or several of them separated by commas, which are then compared
from the same initial weights. It trains on CUDA devices where every rank of a host has one,
else on the CPU (`--device`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd import ops

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
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16 - 0.5
    images = functional.interpolate(images, size=(32, 32), mode="bilinear")
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    train, test = order[:1437], order[1437:]
    labels = torch.tensor(data.target)
    return images[train], labels[train], images[test], labels[test]


def device_of(wanted: str) -> torch.device:
    """Return this rank's device: for "auto" CUDA where every rank of the host has one."""
    devices = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and devices < hvd.local_size()):
        return torch.device("cpu")
    if not devices:
        raise RuntimeError("--device cuda: required a CUDA device, got none; use cpu")
    device = torch.device("cuda", hvd.local_rank() % devices)
    torch.cuda.set_device(device)
    return device


def replicas_identical(model: nn.Module) -> bool:
    """Return whether every rank holds the same bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return len(set(hvd.allgather_object(digest.hexdigest()))) == 1


def progress(op: str, step: int, steps: int, accuracy: float) -> None:
    """Draw one progress bar, on rank 0 only; horovodrun passes carriage returns on."""
    if hvd.rank() == 0:
        filled = 30 * step // steps
        bar = "#" * filled + "." * (30 - filled)
        end = "\n" if step == steps else "\r"
        print(
            f"{op:13s} [{bar}] {step:4d}/{steps} acc {accuracy:.3f}",
            end=end,
            flush=True,
        )


def train(op: str, arguments: argparse.Namespace) -> Result:
    """Train one model with reduction `op` and return what came out."""
    device = device_of(arguments.device)
    train_images, train_labels, test_images, test_labels = (
        tensor.to(device) for tensor in digits()
    )
    torch.manual_seed(arguments.seed)
    model = LeNet5().to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(
        model.parameters(), arguments.lr, momentum=arguments.momentum
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=op
    )
    if hvd.rank() == 0:
        print(hvd.banner(optimizer))
    batch = arguments.batch_size
    per_epoch = len(train_images) // (batch * hvd.size())
    steps = per_epoch * arguments.epochs
    every = max(1, steps // 30)
    result = Result(op)
    started = time.perf_counter()
    for step in range(steps):
        epoch, index = divmod(step, per_epoch)
        if index == 0:
            shuffled = torch.from_numpy(
                np.random.default_rng([arguments.seed, epoch]).permutation(
                    len(train_images)
                )
            )
        mine = shuffled[(index * hvd.size() + hvd.rank()) * batch :][:batch]
        optimizer.zero_grad()
        functional.cross_entropy(
            model(train_images[mine]), train_labels[mine]
        ).backward()
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            with torch.no_grad():
                hits = model(test_images).argmax(1) == test_labels
            result.accuracy = hits.float().mean().item()
            result.curve.append((step + 1, result.accuracy))
            if result.steps_to_target is None and result.accuracy >= TARGET_ACCURACY:
                result.steps_to_target = step + 1
            progress(op, step + 1, steps, result.accuracy)
    result.seconds = time.perf_counter() - started
    result.identical = replicas_identical(model)
    return result


def report(results: list[Result], output: Path) -> None:
    """Print the table and, where matplotlib is installed, draw accuracy over steps."""
    percent = f"{TARGET_ACCURACY:.0%}"
    print(f"\n{'reduction':14s} {'test accuracy':>13s} {'steps to ' + percent:>13s} "
          f"{'seconds':>8s}  replicas identical")  # fmt: skip
    for result in results:
        steps = (
            "never" if result.steps_to_target is None else str(result.steps_to_target)
        )
        print(
            f"{result.op:14s} {result.accuracy:13.3f} {steps:>13s} {result.seconds:8.1f}  "
            f"{'yes' if result.identical else 'NO'}"
        )
    output.mkdir(parents=True, exist_ok=True)
    table = output / "torch_digits.json"
    table.write_text(json.dumps([asdict(result) for result in results], indent=1))
    try:
        import matplotlib
    except ImportError:
        print(f"\nresults: {table} (no picture: matplotlib is not installed)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for result in results:
        axes.plot(*zip(*result.curve, strict=True), label=result.op)
    axes.axhline(TARGET_ACCURACY, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("step")
    axes.set_ylabel("test accuracy")
    axes.set_title(f"LeNet-5 on digits, {hvd.size()} ranks, one learning rate")
    axes.legend()
    figure.savefig(output / "torch_digits.png", dpi=120)
    print(f"\nresults: {table}\npicture: {output / 'torch_digits.png'}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--op", default="adasum-grad", help=f"of {', '.join(ops.names())}"
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="images per rank and step"
    )
    parser.add_argument(
        "--lr", type=float, default=0.03, help="for one process; not scaled"
    )
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=Path("build"))
    arguments = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    results = [train(op, arguments) for op in arguments.op.split(",")]
    if hvd.rank() == 0:
        report(results, arguments.output)
    if not all(result.identical for result in results):
        sys.exit("replicas differ")
    hvd.shutdown()


if __name__ == "__main__":
    main()
