"""The training loop: steps, evaluation, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd import boost
from resnet50 import checkpoint, data, monitors, recipe
from resnet50.model import ResNet50

AMP = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
                "--data-path: expected the same images on all ranks, but got (training images, "
                f"validation images, classes) {sorted(set(everyone))}"
            )
        self.classes = arguments.classes or max(
            found, 1001 if arguments.data == "imagenet" else 0
        )
        if found > self.classes:
            raise ValueError(
                f"--classes: expected at least {found}, but got {self.classes}"
            )
        per_step = arguments.batch_size * hvd.size()
        self.steps_per_epoch = len(train) // (per_step * passes) * passes
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"--batch-size: expected at most {len(train) // (hvd.size() * passes)} for "
                f"{len(train)} images on {hvd.size()} ranks, but got {arguments.batch_size}"
            )
        for steps in (arguments.checkpoint_steps, arguments.max_steps or 0):
            if steps % passes:
                raise ValueError(
                    f"--checkpoint-steps and --max-steps: expected multiples of {passes}, the "
                    f"grad_accumulation_step, but got {steps}"
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
        self.scale.backward(loss / self.passes)
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
