"""Train LeNet-5 on handwritten digits in an elastic job: ranks join, leave and fail.

    echo localhost:2 > hosts
    horovodrun -np 2 --min-np 1 --max-np 4 --network-interfaces lo --gloo \\
        --host-discovery-script "cat hosts" python examples/torch_elastic.py

Write `localhost:4` into the file `hosts` while it trains, or kill a rank: training continues
with the remaining ranks from the same weights. docs/elastic.md lists the steps that are lost.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd.tools.torch_digits import LeNet5, digits


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="adasum-grad")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--commit", type=int, default=10, help="steps between commits")
    return parser.parse_args()


def main() -> None:
    """Train until the last epoch, with any number of ranks."""
    arguments = parse()
    hvd.init()
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    model = LeNet5()
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), op=arguments.op
    )
    sampler = hvd.elastic.ElasticSampler(range(len(images)))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks, step {state.step}", flush=True)
        while state.epoch < arguments.epochs:
            order = list(
                state.sampler
            )  # images of this epoch that no rank has processed
            for start in range(0, len(order), arguments.batch):
                chosen = order[start : start + arguments.batch]
                optimizer.zero_grad()
                functional.cross_entropy(
                    model(images[chosen]), labels[chosen]
                ).backward()
                optimizer.step()
                state.sampler.record_batch(start // arguments.batch, len(chosen))
                state.step += 1
                if state.step % arguments.commit == 0:
                    state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).double().mean().item()
    identical = hvd.check_replicas(model)
    if hvd.rank() == 0:
        print(
            f"{hvd.size()} ranks after {state.step} steps: accuracy {100 * right:.1f} %, replicas "
            f"identical: {identical}"
        )


if __name__ == "__main__":
    main()
