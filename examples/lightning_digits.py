"""Train LeNet-5 on handwritten digits with Lightning, its Trainer or Fabric, and AdaSum's hook.

    python examples/lightning_digits.py --devices 2            # Lightning starts the ranks itself
    torchrun --nproc-per-node 2 examples/lightning_digits.py --with fabric --devices 2

On CUDA, `DDPStrategy(ddp_comm_state=AdasumState(), ddp_comm_hook=adasum_hook)` does what the
strategy here does; on the CPU Lightning would leave the hook out and say nothing.
"""

from __future__ import annotations

import argparse

import torch
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.strategies import DDPStrategy as FabricStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import adasum_hvd.torch as hvd
from adasum_hvd.tools.torch_digits import LeNet5, digits, replicas_identical
from adasum_hvd.torch.ddp import AdasumState, adasum_hook


def reduce_by_adasum(model: DistributedDataParallel) -> None:
    """Start Horovod with the ranks of the process group, and register the hook."""
    hvd.init()
    model.register_comm_hook(AdasumState(), adasum_hook)


class AdasumStrategy(DDPStrategy):
    """The Trainer's DDP with AdaSum, on any device."""

    def configure_ddp(self) -> None:
        """Wrap the model."""
        super().configure_ddp()
        reduce_by_adasum(self.model)


class AdasumFabricStrategy(FabricStrategy):
    """Fabric's DDP with AdaSum, on any device."""

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap a model and return it."""
        model = super().setup_module(module)
        reduce_by_adasum(model)
        return model


class Digits(LightningModule):
    """LeNet-5 and how it is trained."""

    def __init__(self, lr: float):
        super().__init__()
        self.net, self.lr = LeNet5(), lr

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return a batch's loss."""
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a plain optimizer."""
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


def by_trainer(loader: DataLoader, arguments: argparse.Namespace) -> torch.nn.Module:
    """Train with Lightning's Trainer and return the model."""
    module = Digits(arguments.lr)
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        strategy=AdasumStrategy(),
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return module.net


def by_fabric(loader: DataLoader, arguments: argparse.Namespace) -> torch.nn.Module:
    """Train with a loop of our own in Fabric and return the model."""
    fabric = Fabric(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        strategy=AdasumFabricStrategy(),
    )
    fabric.launch()
    net = LeNet5()
    model, optimizer = fabric.setup(
        net, torch.optim.SGD(net.parameters(), arguments.lr, momentum=0.9)
    )
    batches = fabric.setup_dataloaders(loader)
    for epoch in range(arguments.epochs):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            fabric.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
    return net


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--with", dest="loop", default="trainer", choices=["trainer", "fabric"]
    )
    parser.add_argument("--devices", type=int, default=2, help="ranks on this host")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.03, help="for one process")
    arguments = parser.parse_args()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    loader = DataLoader(TensorDataset(images, labels), 32, shuffle=True, drop_last=True)
    train = by_trainer if arguments.loop == "trainer" else by_fabric
    net = train(loader, arguments).cpu().eval()
    with torch.no_grad():
        accuracy = (net(test_images).argmax(1) == test_labels).float().mean().item()
    same, calls = replicas_identical(net), hvd.counters().calls
    if hvd.rank() == 0:
        print(
            f"{arguments.loop}: {hvd.size()} ranks, test accuracy {accuracy:.3f}, replicas "
            f"identical: {'yes' if same else 'NO'}, {calls} reductions by AdaSum",
            flush=True,
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
