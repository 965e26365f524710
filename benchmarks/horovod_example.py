"""Horovod's MNIST example with its own settings, as real jobs of several ranks.

    python benchmarks/horovod_example.py              # 1, 2, 4 and 8 ranks
    python benchmarks/horovod_example.py --ranks 1 2 --images 6000 --epochs 2

The settings are those of Horovod's `pytorch_mnist` example: two convolutions and dropout, 64
images per rank and step, learning rate 0.01, momentum 0.5, 10 epochs, seed 42. With Average it
multiplies the rate by the ranks, with AdaSum (the delta variant) it leaves the rate alone; so
does this, and shows Average at the plain rate, too. scikit-learn's 1437 training digits stand
in for MNIST, enlarged to 28 x 28 and moved by up to 2 pixels anew each time; an epoch is as
many images as MNIST has.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jobs
import torch
from jobs import REPOSITORY
from torch import nn
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd.tools.torch_digits import digits

sys.path.insert(0, str(REPOSITORY / "examples"))

LR, MOMENTUM, BATCH, SEED = 0.01, 0.5, 64, 42
FORMS = {  # name: (op, whether the rate is multiplied by the ranks)
    "Average, lr x ranks": ("average", True),
    "Average": ("average", False),
    "AdaSum": ("adasum", False),
}


def network() -> nn.Module:
    """Return the example's network, for images of shape (batch, 1, 28, 28)."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10),
    )  # fmt: skip


def moved(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Cut (n, 1, 28, 28) out of (n, 1, 32, 32), each image at a place of its own."""
    count = len(images)
    top, left = torch.randint(0, 5, (2, count, 1, 1), generator=generator)
    rows = top + torch.arange(28).view(1, 28, 1)
    columns = left + torch.arange(28).view(1, 1, 28)
    return images[torch.arange(count).view(-1, 1, 1), 0, rows, columns][:, None]


def rank_main(form: str, images: int, epochs: int, output: Path) -> None:
    """Train as one rank; rank 0 writes the accuracy after each epoch."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    op, scaled = FORMS[form]
    model = network()
    hvd.broadcast_parameters(model.state_dict(), 0)
    lr = LR * (hvd.size() if scaled else 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr, momentum=MOMENTUM),
        model.named_parameters(),
        op=op,
    )
    train_images, train_labels, test_images, test_labels = digits()
    mean, deviation = train_images.mean(), train_images.std()
    train_images = (train_images - mean) / deviation
    test_images = (test_images - mean) / deviation
    generator = torch.Generator().manual_seed(SEED + hvd.rank())
    accuracies = []
    for _ in range(epochs):
        model.train()
        for _ in range(images // (BATCH * hvd.size())):
            chosen = torch.randint(len(train_images), (BATCH,), generator=generator)
            optimizer.zero_grad()
            scores = model(moved(train_images[chosen], generator))
            functional.cross_entropy(scores, train_labels[chosen]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            hits = model(test_images[..., 2:30, 2:30]).argmax(1) == test_labels
        accuracies.append(round(hits.float().mean().item(), 4))
    hvd.check_replicas(model)
    if hvd.rank() == 0:
        output.write_text(json.dumps(accuracies))
    hvd.shutdown()


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--rank"]:
        form, images, epochs, output = sys.argv[2:]
        rank_main(form, int(images), int(epochs), Path(output))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--images", type=int, default=60000, help="in an epoch")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("build/example.json"))
    arguments = parser.parse_args()
    rows = []
    for ranks in arguments.ranks:
        for form in FORMS if ranks > 1 else ["Average"]:
            found = jobs.run(
                "gloo", ranks, __file__, form, arguments.images, arguments.epochs
            )
            rows.append({"ranks": ranks, "form": form, "accuracies": found})
            shown = " ".join(f"{100 * accuracy:5.1f}" for accuracy in found)
            print(f"{ranks:2d} ranks {form:20s} {shown}", flush=True)
    jobs.save(rows, arguments.output)


if __name__ == "__main__":
    main()
