"""Train LeNet-5 on scikit-learn's handwritten digits with Horovod, one process per rank.

    horovodrun -np 4 --gloo python examples/torch_digits.py --op adasum-grad

The learning rate is the one that is best for a single process. AdaSum of gradients needs no
other, but with 8 ranks and more 1.73 times it takes fewer steps (docs/choose.md).
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import adasum_hvd.torch as hvd
from adasum_hvd.tools.torch_digits import LeNet5, device_of, digits


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="adasum-grad")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--lr", type=float, default=0.03, help="not scaled by the ranks"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    arguments = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    device = device_of(arguments.device, hvd.local_rank(), hvd.local_size())
    images, labels, test_images, test_labels = digits()
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, hvd.size(), hvd.rank(), drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    model = LeNet5().to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), op=arguments.op
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
        hits = model(test_images.to(device)).argmax(1).cpu() == test_labels
    if hvd.rank() == 0:
        print(hvd.banner(optimizer))
        print(f"test accuracy {hits.float().mean().item():.3f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
