"""Train LeNet-5 on handwritten digits with your own loop in Lightning's Fabric.

torchrun --nproc-per-node 2 examples/lightning_fabric.py --devices 2
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from lightning import Fabric
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from adasum_hvd.distributed import check_replicas
from adasum_hvd.integrations.lightning import AdasumFabricStrategy
from adasum_hvd.tools.torch_digits import LeNet5, digits


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="ranks on this host")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.03, help="for one process")
    arguments = parser.parse_args()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    loader = DataLoader(TensorDataset(images, labels), 32, shuffle=True, drop_last=True)
    fabric = Fabric(
        accelerator=arguments.accelerator, devices=arguments.devices,
        strategy=AdasumFabricStrategy(),
    )  # fmt: skip
    fabric.launch()
    net = LeNet5()
    optimizer = torch.optim.SGD(net.parameters(), arguments.lr, momentum=0.9)
    model, optimizer = fabric.setup(net, optimizer)
    batches = fabric.setup_dataloaders(loader)
    for epoch in range(arguments.epochs):
        batches.sampler.set_epoch(epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            fabric.backward(functional.cross_entropy(model(inputs), targets))
            optimizer.step()
    net = net.cpu().eval()
    check_replicas(net)
    with torch.no_grad():
        hits = net(test_images).argmax(1) == test_labels
    reduced = fabric.strategy.state.passes
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {reduced} passes reduced by AdaSum")
        print(f"test accuracy {hits.float().mean().item():.3f}", flush=True)


if __name__ == "__main__":
    main()
