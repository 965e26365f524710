"""Train LeNet-5 on handwritten digits with Ray Train and AdaSum's DDP hook.

    pip install 'ray[train]'
    python examples/ray_train.py --workers 2

Ray starts the workers and their process group; AdaSum's `prepare_model`
makes DDP's average an AdaSum. Nothing is compiled, and Horovod is not needed.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from adasum_hvd.distributed import check_replicas
from adasum_hvd.integrations.ray import prepare_model
from adasum_hvd.tools.torch_digits import LeNet5, digits


def train(settings: dict[str, Any]) -> None:
    """Train on one worker; Ray calls it on all of them."""
    torch.manual_seed(42)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = prepare_model(LeNet5())  # DDP, of the workers' process group
    optimizer = torch.optim.SGD(model.parameters(), settings["lr"], momentum=0.9)
    for epoch in range(settings["epochs"]):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    check_replicas(model)
    with torch.no_grad():
        hits = model(test_images).argmax(1) == test_labels
    if dist.get_rank() == 0:
        accuracy = hits.float().mean().item()
        print(f"{dist.get_world_size()} ranks, test accuracy {accuracy:.3f}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.03, help="for one process")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"epochs": arguments.epochs, "lr": arguments.lr},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=arguments.workers),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()


if __name__ == "__main__":
    main()
