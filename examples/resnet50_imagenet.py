"""Train ResNet-50 on ImageNet with AdaSum over groups of ranks; docs/tutorial.md explains it.

    horovodrun -np 16 -H node1:8,node2:8 python examples/resnet50_imagenet.py \\
        --data-path /data/imagenet --checkpoint /data/checkpoints
    horovodrun -np 16 python examples/resnet50_imagenet.py --data digits   # on one machine
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from resnet50 import checkpoint, data, monitors, recipe
from resnet50.model import ResNet50
from torch import nn
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd import boost

# The tutorial's second listing: nothing but AdaSum of what the level would turn on.
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
# What makes `--data digits` and `--data synthetic` a matter of seconds on a few cores.
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
AMP = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    add("--checkpoint-steps", type=int, default=0, help="besides every epoch's end")
    add("--max-steps", type=int, help="stop after this many steps in all")
    add("--epoch-log", type=Path, help="append one JSON object per epoch")
    add("--seed", type=int, default=1)
    if parser.parse_known_args(argv)[0].data != "imagenet":
        parser.set_defaults(**SMALL)
    return parser.parse_args(argv)


class Training:
    """Model, data and optimizer of one run."""

    def __init__(self, arguments: argparse.Namespace, switch: boost.Boost):
        self.arguments = arguments
        self.log = monitors.Log(arguments.epoch_log)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", hvd.local_rank())
            torch.cuda.set_device(self.device)
        self._load_data(switch.accumulation_steps)
        torch.manual_seed(arguments.seed)
        self.model = ResNet50(self.classes, arguments.width).to(self.device)
        groups = recipe.parameter_groups(self.model, arguments.weight_decay)
        optimizer = torch.optim.SGD(
            groups, lr=arguments.lr, momentum=arguments.momentum
        )
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            self.model.named_parameters(),
            model=self.model,
            **switch.optimizer_arguments(hvd),
        )
        self.passes = switch.accumulation_steps
        dynamic = arguments.loss_scale == "dynamic"
        self.scale: Any = (
            recipe.DynamicLossScale(self.device.type)
            if dynamic
            else recipe.FixedLossScale(float(arguments.loss_scale))
        )
        self.step = 0
        self.log.say(hvd.banner(self.optimizer))

    def _load_data(self, passes: int) -> None:
        arguments = self.arguments

        def read() -> Any:
            if arguments.data == "imagenet":
                return data.imagenet(
                    arguments.data_path, arguments.image_size, arguments.seed
                )
            make = {"digits": data.digits, "synthetic": data.synthetic}[arguments.data]
            return make(arguments.image_size)

        train, test, found = checkpoint.on_all_ranks("reading the data", read)
        everyone = hvd.allgather_object((len(train), len(test), found))
        if len(set(everyone)) > 1:
            raise ValueError(
                "--data-path: required the same images on all ranks, got (training images, "
                f"validation images, classes) {sorted(set(everyone))}"
            )
        self.classes = arguments.classes or max(
            found, 1001 if arguments.data == "imagenet" else 0
        )
        if found > self.classes:
            raise ValueError(
                f"--classes: required at least {found}, got {self.classes}"
            )
        per_step = arguments.batch_size * hvd.size()
        self.steps_per_epoch = len(train) // (per_step * passes) * passes
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"--batch-size: required at most {len(train) // (hvd.size() * passes)} for "
                f"{len(train)} images on {hvd.size()} ranks, got {arguments.batch_size}"
            )
        for steps in (arguments.checkpoint_steps, arguments.max_steps or 0):
            if steps % passes:
                raise ValueError(
                    f"--checkpoint-steps and --max-steps: required multiples of {passes}, the "
                    f"grad_accumulation_step, got {steps}"
                )
        self.sampler = data.RankSampler(
            len(train),
            hvd.rank(),
            hvd.size(),
            arguments.batch_size,
            self.steps_per_epoch,
            arguments.seed,
        )
        batch, workers = arguments.batch_size, arguments.workers
        self.train_loader = data.loader(train, self.sampler, batch, workers)
        share = data.EvaluationSampler(len(test), hvd.rank(), hvd.size())
        self.test_loader = data.loader(test, share, batch, workers)

    # ---- checkpoints ----

    def _run(self) -> dict[str, Any]:
        """Return what a checkpoint must share with the run that resumes from it."""
        names = (
            "data epochs warmup_epochs lr lr_end batch_size momentum weight_decay seed"
        )
        names += (
            " label_smoothing loss_scale amp width image_size boost_level boost_config"
        )
        run = {name: getattr(self.arguments, name) for name in names.split()}
        return {**run, "classes": self.classes, "ranks": hvd.size()}

    def save(self) -> None:
        """Write a checkpoint, if asked for. Collective; blocks."""
        if self.arguments.checkpoint:
            state = {
                "run": self._run(),
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scale": self.scale.state_dict(),
            }
            checkpoint.save(self.arguments.checkpoint, self.step, state)

    def resume(self) -> None:
        """Load the latest checkpoint, or start from rank 0's weights. Collective; blocks."""
        folder = self.arguments.checkpoint
        state = checkpoint.load(folder, self._run()) if folder else None
        if state is None:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scale.load_state_dict(state["scale"])
        self.step = state["step"]
        self.log.say(f"resumed after step {self.step}")

    # ---- training ----

    def _autocast(self) -> Any:
        dtype = AMP[self.arguments.amp]
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype)

    def _set_learning_rate(self) -> float:
        arguments, per_epoch = self.arguments, self.steps_per_epoch
        lr = recipe.learning_rate(
            self.step,
            arguments.warmup_epochs * per_epoch,
            arguments.epochs * per_epoch,
            arguments.lr,
            arguments.lr_end,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _train_step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        with self._autocast():
            loss = functional.cross_entropy(
                self.model(images),
                labels,
                label_smoothing=self.arguments.label_smoothing,
            )
        self.scale.backward(loss)
        self.step += 1
        if self.step % self.passes == 0:
            self.scale.step(self.optimizer)
            self.optimizer.zero_grad()
        return loss

    def _train_epoch(self) -> None:
        """Train to the end of the epoch, or until `--max-steps`."""
        epoch, first_step = divmod(self.step, self.steps_per_epoch)
        self.sampler.epoch, self.sampler.first_step = epoch, first_step
        self.model.train()
        losses, started, lr = monitors.LossMonitor(), time.perf_counter(), 0.0
        for images, labels in self.train_loader:
            lr = self._set_learning_rate()
            losses.add(self._train_step(images, labels))
            ended = self.step % self.steps_per_epoch == 0
            if not ended and self.step == self.arguments.max_steps:
                return
            every = self.arguments.checkpoint_steps
            if not ended and every and self.step % every == 0:
                self.save()
        results = losses.results()
        seconds = time.perf_counter() - started
        average_statistics(self.model)
        steps = self.steps_per_epoch - first_step
        images_seen = steps * self.arguments.batch_size * hvd.size()
        accuracy = self.evaluate()
        self.log.epoch(epoch + 1, steps, seconds, images_seen, results, accuracy, lr)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the top-1 accuracy over all ranks' shares. Collective; blocks."""
        self.model.eval()
        counts = torch.zeros(2, dtype=torch.int64)
        for images, labels in self.test_loader:
            with self._autocast():
                found = self.model(images.to(self.device)).argmax(1).cpu()
            counts += torch.tensor([int((found == labels).sum()), len(labels)])
        hits, total = hvd.allreduce(counts, name="evaluate", op=hvd.Sum).tolist()
        return hits / total

    def run(self) -> None:
        """Train to the last epoch or `--max-steps`. Collective."""
        self.log.say("============== Starting Training ==============")
        total = self.arguments.epochs * self.steps_per_epoch
        last = min(total, self.arguments.max_steps or total)
        while self.step < last:
            self._train_epoch()
            self.save()
        if self.step % self.steps_per_epoch == 0:  # else the statistics are local
            hvd.check_replicas(self.model)


def average_statistics(model: nn.Module) -> None:
    """Average batch normalization's statistics, which are local, over the ranks."""
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if buffers:
        hvd.grouped_allreduce_(buffers, name="statistics", op=hvd.Average)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    arguments = parse(argv)
    switch = boost.switch(arguments.boost_level, arguments.boost_config)
    hvd.init(**switch.init_arguments())
    training = Training(arguments, switch)
    training.resume()
    training.run()
    hvd.shutdown()


if __name__ == "__main__":
    main()
