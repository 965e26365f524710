"""Train LeNet-5 on handwritten digits with DistributedDataParallel and AdaSum; without Horovod.

    torchrun --nproc-per-node 4 examples/torch_ddp.py

One line makes DDP's average an AdaSum: `register_comm_hook`. `--op adasum-delta` reduces changes of
weights: gradients stay local, and `reduce_changes` does the rest. `--op average` is DDP as it is.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from adasum_hvd.distributed import (
    AdasumMonitor,
    AdasumState,
    adasum_hook,
    banner,
    check_replicas,
    reduce_changes,
)
from adasum_hvd.tools.torch_digits import LeNet5, device_of, digits


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ops = ("average", "adasum-grad", "adasum-delta")
    parser.add_argument("--op", default="adasum-grad", choices=ops)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.03, help="for one process")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--record", help="of adasum-grad every 4 steps: a .jsonl file")
    arguments = parser.parse_args()

    local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = device_of(arguments.device, *local)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    torch.manual_seed(42)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(LeNet5().to(device))
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9)
    state = AdasumState()
    if arguments.op == "adasum-grad":
        model.register_comm_hook(state, adasum_hook)
        to = arguments.record or ()
        monitor = AdasumMonitor(state, 4, to, model.module.named_parameters())
        if dist.get_rank() == 0:
            print(banner(state, optimizer))
    elif arguments.op == "adasum-delta":
        reduce_changes(optimizer)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            is_delta = arguments.op == "adasum-delta"
            with model.no_sync() if is_delta else nullcontext():
                outputs = model(inputs.to(device))
                functional.cross_entropy(outputs, targets.to(device)).backward()
            optimizer.step()
    if arguments.op == "adasum-grad":
        monitor.close()
    check_replicas(model)
    with torch.no_grad():
        hits = model.module(test_images.to(device)).argmax(1).cpu() == test_labels
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, identical replicas")
        print(f"test accuracy {hits.float().mean().item():.3f}")
    del model  # DDP before its process group: docs/troubleshooting.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
