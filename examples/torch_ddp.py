"""Train LeNet-5 on handwritten digits with DistributedDataParallel and AdaSum's hook.

    torchrun --nproc-per-node 3 examples/torch_ddp.py

Two lines make DDP's average an AdaSum: `hvd.init()`, which takes the ranks from torch's process
group, and `register_comm_hook`. `--op adasum-delta` reduces changes of weights: its hook keeps
gradients local, and `DistributedOptimizer` does the rest. `--op average` is DDP as it is.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import adasum_hvd.torch as hvd
from adasum_hvd.tools.torch_digits import LeNet5, device_of, digits
from adasum_hvd.torch.ddp import AdasumState, adasum_hook, keep_local_hook


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ops = ("average", "adasum-grad", "adasum-delta")
    parser.add_argument("--op", default="adasum-grad", choices=ops)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.03, help="for one process")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    hvd.init()  # with the ranks of the process group
    torch.manual_seed(42)
    torch.set_num_threads(1)
    device = device_of(arguments.device)
    images, labels, test_images, test_labels = digits()
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(LeNet5().to(device))
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9)
    if arguments.op == "adasum-grad":
        model.register_comm_hook(AdasumState(), adasum_hook)
    elif arguments.op == "adasum-delta":
        model.register_comm_hook(None, keep_local_hook)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), op=arguments.op, model=model
        )
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs.to(device))
            functional.cross_entropy(outputs, targets.to(device)).backward()
            optimizer.step()
    hvd.check_replicas(model)
    with torch.no_grad():
        hits = model.module(test_images.to(device)).argmax(1).cpu() == test_labels
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {hvd.counters().calls} reductions by AdaSum")
        print(f"test accuracy {hits.float().mean().item():.3f}")
    hvd.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
