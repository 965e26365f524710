"""Train ResNet-50 on ImageNet with AdaSum over groups of ranks; docs/mindspore.md explains it.

    horovodrun -np 16 --gloo -H node1:8,node2:8 python examples/resnet50_imagenet.py \\
        --data-path /data/imagenet --checkpoint /data/checkpoints
    horovodrun -np 16 --gloo python examples/resnet50_imagenet.py --data digits   # on one machine
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from resnet50.training import AMP, Training

import adasum_hvd.torch as hvd
from adasum_hvd import boost

# The tutorial's second listing: of the level's features, only AdaSum is on.
BOOST_CONFIG = {
    "boost": {
        "mode": "manual",
        "less_bn": False,
        "grad_freeze": False,
        "adasum": True,
        "grad_accumulation": False,
        "dim_reduce": False,
    }
}
# Defaults for `--data digits` and `--data synthetic`, which then take seconds on a few cores.
SMALL = {
    "epochs": 6,
    "warmup_epochs": 1,
    "lr": 0.2,
    "batch_size": 8,
    "image_size": 32,
    "width": 1 / 16,
    "workers": 0,
    "label_smoothing": 0.0,
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line; `--data` other than imagenet changes the defaults to `SMALL`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", choices=["imagenet", "digits", "synthetic"], default="imagenet")
    add(
        "--data-path", type=Path, help="holds train/ and validation_preprocess/ or val/"
    )
    add("--epochs", type=int, default=90)
    add("--warmup-epochs", type=int, default=5)
    add("--lr", type=float, default=0.8, help="at the end of the warm-up")
    add("--lr-end", type=float, default=0.0)
    add("--batch-size", type=int, default=256, help="images per rank and step")
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=1e-4)
    add("--label-smoothing", type=float, default=0.1)
    add("--loss-scale", default="1024", help='a number, or "dynamic"')
    add("--amp", choices=AMP, default="none", help="autocast to this type")
    add("--classes", type=int, help="logits (default: 1001 for imagenet, else 10)")
    add("--width", type=float, default=1.0, help="factor on the numbers of channels")
    add("--image-size", type=int, default=224)
    add("--boost-level", default="O2", help="O0, O1 or O2")
    add("--boost-config", type=json.loads, default=BOOST_CONFIG, metavar="JSON")
    add("--workers", type=int, default=8, help="processes that read images, per rank")
    add(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="save there, resume from there",
    )
    add("--checkpoint-steps", type=int, default=0, help="also within epochs")
    add("--max-steps", type=int, help="stop after this many steps in all")
    add("--epoch-log", type=Path, help="append one JSON object per epoch")
    add("--seed", type=int, default=1)
    if parser.parse_known_args(argv)[0].data != "imagenet":
        parser.set_defaults(**SMALL)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    arguments = parse(argv)
    level, settings = arguments.boost_level, arguments.boost_config
    switch = boost.switch(level, settings, gradients_mean=True)
    hvd.init(**switch.init_arguments())
    training = Training(arguments, switch)
    training.resume()
    training.run()
    hvd.shutdown()


if __name__ == "__main__":
    main()
