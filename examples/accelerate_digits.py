"""Train LeNet-5 on handwritten digits with Accelerate and AdaSum's hook.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py      # or accelerate launch

Accumulation and clipping stay Accelerate's.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from adasum_hvd.distributed import check_replicas
from adasum_hvd.integrations.accelerate import use_adasum
from adasum_hvd.tools.torch_digits import LeNet5, digits


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="else the CPU")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.03, help="for one process")
    arguments = parser.parse_args()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=not arguments.cuda, gradient_accumulation_steps=2)
    images, labels, test_images, test_labels = digits()
    loader = DataLoader(TensorDataset(images, labels), 16, shuffle=True, drop_last=True)
    net = LeNet5()
    optimizer = torch.optim.SGD(net.parameters(), arguments.lr, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    (state,) = use_adasum(model)
    for _ in range(arguments.epochs):
        for batch, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(batch), target))
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
    net = accelerator.unwrap_model(model).cpu().eval()
    check_replicas(net)
    with torch.no_grad():
        hits = net(test_images).argmax(1) == test_labels
    if accelerator.is_main_process:
        print(f"{dist.get_world_size()} ranks, {state.passes} passes reduced by AdaSum")
        print(f"test accuracy {hits.float().mean().item():.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
