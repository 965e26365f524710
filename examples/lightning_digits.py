"""Train LeNet-5 on handwritten digits with Lightning's Trainer and AdaSum's hook.

python examples/lightning_digits.py --devices 2            # Lightning starts the ranks itself
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from adasum_hvd.distributed import check_replicas
from adasum_hvd.integrations.lightning import AdasumDDPStrategy
from adasum_hvd.tools.torch_digits import LeNet5, digits


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
    module = Digits(arguments.lr)
    trainer = Trainer(
        accelerator=arguments.accelerator, devices=arguments.devices,
        strategy=AdasumDDPStrategy(),
        max_epochs=arguments.epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    net = module.net.cpu().eval()
    check_replicas(net)
    with torch.no_grad():
        hits = net(test_images).argmax(1) == test_labels
    reduced = trainer.strategy.state.passes
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {reduced} passes reduced by AdaSum")
        print(f"test accuracy {hits.float().mean().item():.3f}", flush=True)


if __name__ == "__main__":
    main()
