"""Train LeNet-5 on handwritten digits with DistributedDataParallel and AdaSum's hook.

    torchrun --nproc-per-node 3 examples/torch_ddp.py

Two lines make DDP's average an AdaSum: `hvd.init()`, which takes the ranks from torch's process
group, and `register_comm_hook`. The learning rate is the one that is best for a single process.
`--reduce` takes average (DDP as it is), adasum-grad (the hook) and adasum-delta (a hook that
keeps gradients local, and `DistributedOptimizer`), or several of them, separated by commas.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import adasum_hvd.torch as hvd
from adasum_hvd.tools.torch_digits import LeNet5, device_of, digits, replicas_identical
from adasum_hvd.torch.ddp import AdasumState, adasum_hook, keep_local_hook

REDUCTIONS = ("average", "adasum-grad", "adasum-delta")


def train(reduction: str, arguments: argparse.Namespace) -> tuple[float, float, bool]:
    """Return the test accuracy, the seconds, and whether all ranks hold the same bits."""
    device = device_of(arguments.device)
    train_images, train_labels, test_images, test_labels = digits()
    torch.manual_seed(arguments.seed)
    model = DistributedDataParallel(LeNet5().to(device))
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9)
    if reduction == "adasum-grad":
        model.register_comm_hook(AdasumState(), adasum_hook)
    elif reduction == "adasum-delta":
        model.register_comm_hook(None, keep_local_hook)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), op=hvd.AdasumDelta, model=model
        )
    data = TensorDataset(train_images, train_labels)
    sampler = DistributedSampler(data, seed=arguments.seed, drop_last=True)
    loader = DataLoader(data, arguments.batch_size, sampler=sampler, drop_last=True)
    started = time.perf_counter()
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        hits = model.module(test_images.to(device)).argmax(1).cpu() == test_labels
    return hits.float().mean().item(), seconds, replicas_identical(model.module)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reduce", default=",".join(REDUCTIONS))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="images per rank and step"
    )
    parser.add_argument(
        "--lr", type=float, default=0.03, help="for one process; not scaled"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    arguments = parser.parse_args()
    chosen = arguments.reduce.split(",")
    if not set(chosen) <= set(REDUCTIONS):
        parser.error(f"--reduce: required some of {', '.join(REDUCTIONS)}")

    dist.init_process_group("gloo")
    hvd.init()
    torch.set_num_threads(1)
    identical = []
    for reduction in chosen:
        accuracy, seconds, same = train(reduction, arguments)
        identical.append(same)
        if hvd.rank() == 0:
            if reduction == chosen[0]:
                print(
                    f"{'reduction':14s} {'test accuracy':>13s} {'seconds':>8s}  replicas identical"
                )
            print(
                f"{reduction:14s} {accuracy:13.3f} {seconds:8.1f}  {'yes' if same else 'NO'}",
                flush=True,
            )
    hvd.shutdown()
    dist.destroy_process_group()
    if not all(identical):
        sys.exit("replicas differ")


if __name__ == "__main__":
    main()
