"""Train with DDP and AdaSum in a job that continues after a rank has died.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # docs/distributed.md: else torchrun may hang
    torchrun --nproc-per-node 4 --max-restarts 3 examples/torch_restarts.py --checkpoint digits.pt

When a rank dies, torchrun ends the others and starts all of them again. They resume after the last
whole epoch, and end with the weights of a job without the fault, bit for bit. The hook has no
state, so the checkpoint is that of a program without AdaSum.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from adasum_hvd.distributed import AdasumState, adasum_hook, check_replicas
from adasum_hvd.tools.torch_digits import LeNet5, digits


def save(path: Path, state: dict) -> None:
    """Write a checkpoint, whole or not at all, on rank 0."""
    if dist.get_rank() == 0:
        new = path.with_suffix(".new")
        torch.save(state, new)
        new.replace(path)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.03, help="for one process")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    model, first_epoch = LeNet5(), 0
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9)
    if arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epochs"]
    if first_epoch and dist.get_rank() == 0:
        print(f"resumes after {first_epoch} epochs", flush=True)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(AdasumState(), adasum_hook)
    for epoch in range(first_epoch, arguments.epochs):
        if dist.get_rank() == 0:
            print(f"epoch {epoch}", flush=True)
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(arguments.checkpoint, state | {"epochs": epoch + 1})
    check_replicas(ddp, optimizer)
    with torch.no_grad():
        hits = model(test_images).argmax(1) == test_labels
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, identical replicas")
        print(f"test accuracy {hits.float().mean().item():.3f}")
    del ddp  # before its process group: docs/troubleshooting.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
