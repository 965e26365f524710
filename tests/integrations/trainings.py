"""Other people's loops with our modules: train, evaluate, train again, and resume.

    python -m tests.integrations.trainings lightning FOLDER
    python -m tests.integrations.trainings ray FOLDER 2        # Ray starts the workers
    torchrun --nproc-per-node 2 -m tests.integrations.trainings transformers FOLDER

Every rank has batches of its own. Prints what AdaSum has reduced, and whether replicas are equal.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adasum_hvd.distributed import AdasumState, check_replicas

FOLDER = sys.argv[2]  # for checkpoints, of all ranks
RANK = int(os.environ.get("RANK", "0"))
ROWS, BATCH = 32, 4
reduced: list[None] = []
watched: list[object] = []


def watch(state: AdasumState | None) -> None:
    """Count the backward passes of each state once."""
    if state is not None and state not in watched:
        watched.append(state)
        state.on_round(lambda: reduced.append(None))


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, 5, generator=generator)
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), BATCH)


def report(model: nn.Module, losses: list[float]) -> None:
    """Print a line on the first rank, after a comparison of the replicas."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several:
        check_replicas(model)
    if RANK == 0:
        ranks = dist.get_world_size() if several else 1
        falls = losses[-1] < losses[0]
        print(
            f"{ranks} ranks, {len(reduced)} passes, {len(losses)} losses, falls: {falls}"
        )


def transformers() -> None:
    """Train, evaluate, train again, and resume from a checkpoint."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
    )  # fmt: skip

    from adasum_hvd.integrations.transformers import AdasumCallback

    class Watched(AdasumCallback):
        def on_train_begin(self, *arguments: object, **named: object) -> None:
            with warnings.catch_warnings(record=True) as caught:
                super().on_train_begin(*arguments, **named)
            outside = [w for w in caught if "but got 1 others" in str(w.message)]
            assert bool(outside) == (self.state is not None), caught
            watch(self.state)

    class WithLoss(Trainer):
        def create_optimizer(self, *arguments: object) -> torch.optim.Optimizer:
            """Return one that has parameters outside of the model; it trains one of them alone."""
            made, optimizer = self.optimizer, super().create_optimizer(*arguments)
            if made is None:
                others = [nn.Parameter(torch.ones(2)) for _ in range(3)]
                others[1].requires_grad_(False)
                # As one that reduces.
                others[2].register_post_accumulate_grad_hook(print)
                optimizer.add_param_group({"params": others})
            return optimizer

    config = GPT2Config(
        vocab_size=21, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    rows = [torch.arange(k % 16, k % 16 + 5) for k in range(ROWS)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    settings = TrainingArguments(
        FOLDER, num_train_epochs=1, per_device_train_batch_size=BATCH, learning_rate=1e-2,
        use_cpu=True, ddp_backend="gloo" if "RANK" in os.environ else None,
        save_strategy="epoch", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = WithLoss(
        model, settings, train_dataset=data, eval_dataset=data, callbacks=[Watched()]
    )
    # Not `evaluate`: before the first `train` it makes this Trainer's ranks train alone.
    inputs = torch.stack(rows)
    losses = [model(input_ids=inputs, labels=inputs).loss.item()]
    trainer.train()
    losses.append(trainer.evaluate()["eval_loss"])
    trainer.train()
    trainer.args.num_train_epochs = 2
    trainer.train(resume_from_checkpoint=True)
    losses.append(trainer.evaluate()["eval_loss"])
    if dist.is_initialized():
        dist.barrier()
    report(model, losses)


def accelerate() -> None:
    """Train, save and load the state, and train again with a model prepared once more."""
    from accelerate import Accelerator

    from adasum_hvd.integrations.accelerate import use_adasum

    torch.manual_seed(0)
    net, losses = nn.Linear(5, 1), []
    accelerator = Accelerator(cpu=True)
    for fit in range(2):
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        model, optimizer, batches = accelerator.prepare(net, optimizer, loader())
        for state in use_adasum(model, optimizer):
            watch(state)
        if fit:
            nn.init.zeros_(net.weight)  # the checkpoint's come back
            accelerator.load_state(FOLDER)
        for _ in range(3):
            total = 0.0
            for inputs, targets in batches:
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item()
            losses.append(total)
        with torch.no_grad():  # an evaluation
            losses.append(
                sum(model(x).sub(y).square().sum().item() for x, y in batches)
            )
        if not fit:
            accelerator.save_state(FOLDER)
        net = accelerator.unwrap_model(model)
        model, optimizer, batches = accelerator.free_memory(model, optimizer, batches)
    assert losses[4] < losses[0], losses
    report(net, losses)


def lightning_line() -> type:
    """Return the class of a Lightning module that learns to add."""
    from lightning import LightningModule

    class Line(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = nn.Linear(5, 1), []

        def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss = self._loss(batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
            self.log("loss", self._loss(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.05)

    return Line


def lightning_trainer(strategy: object, epochs: int, **more: object) -> object:
    """Return a Trainer of this job's ranks that writes nothing by itself."""
    from lightning import Trainer

    return Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy, max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip


def fit_and_resume(line: type, trainer_of: Callable[[int], object]) -> tuple:
    """Fit, validate, fit again, and resume in a Trainer of its own from the checkpoint.

    Returns:
        The first Trainer, the module, and the one that has resumed.
    """
    module, saved = line(), f"{FOLDER}/line.ckpt"
    trainer = trainer_of(1)
    trainer.fit(module, loader(), loader())
    trainer.validate(module, loader(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(saved)
    resumed = line()
    trainer_of(4).fit(resumed, loader(), loader(), ckpt_path=saved)
    return trainer, module, resumed


def lightning() -> None:
    """Train by DDP."""
    from adasum_hvd.integrations.lightning import AdasumDDPStrategy

    class Watched(AdasumDDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()
            watch(self.state)

    _, module, resumed = fit_and_resume(
        lightning_line(),
        lambda epochs: lightning_trainer(Watched(rule="adasum"), epochs),
    )
    report(resumed, module.losses + resumed.losses)


def lightning_fsdp2() -> None:
    """Train a sharded model, and then what has resumed in another Trainer."""
    from torch.distributed.fsdp import fully_shard

    from adasum_hvd.integrations.lightning import AdasumFSDP2Strategy

    ranks = int(os.environ["WORLD_SIZE"])

    class Sharded(lightning_line()):
        def configure_model(self) -> None:
            if not hasattr(self.net, "set_requires_gradient_sync"):  # the first fit
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
            reduced.append(None)
            gradient = self.net.weight.grad.full_tensor()
            every = [torch.empty_like(gradient) for _ in range(ranks)]
            dist.all_gather(every, gradient)
            assert all(torch.equal(gradient, one) for one in every)

    def trainer_of(epochs: int, passes: int = 1) -> object:
        strategy = AdasumFSDP2Strategy(
            replicas=2, rule="adasum", data_parallel_size=ranks, tensor_parallel_size=1
        )
        return lightning_trainer(
            strategy, epochs, gradient_clip_val=5.0, accumulate_grad_batches=passes
        )

    torch.manual_seed(RANK)  # the first replica's weights are everyone's
    trainer, module, resumed = fit_and_resume(Sharded, trainer_of)
    sampler = trainer.train_dataloader.sampler
    assert (sampler.num_replicas, sampler.rank) == (ranks, RANK)
    assert resumed.losses[0] < module.losses[0]
    # The same model in another Trainer.
    trainer_of(4, passes=2).fit(resumed, loader(), loader())
    report(resumed, module.losses + resumed.losses)


def ray_worker(settings: dict[str, str]) -> None:
    """Train a worker, and save or resume."""
    from pathlib import Path

    from adasum_hvd.integrations.ray import prepare_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    saved, losses = Path(settings["folder"], "line.pt"), []
    model = prepare_model(nn.Linear(5, 1), {"rule": "adasum"})
    net = getattr(model, "module", model)
    if saved.exists():
        net.load_state_dict(torch.load(saved))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for inputs, targets in loader():
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    check_replicas(model)
    if int(settings["workers"]) > 1:
        dist.barrier()
    if not (dist.is_initialized() and dist.get_rank()):
        torch.save(net.state_dict(), saved)
        print(f"{settings['workers']} workers, losses {losses[0]:.4f} {losses[-1]:.4f}")


def ray() -> None:
    """Train twice; the second training resumes from the weights of the first one."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    for _ in range(2):
        TorchTrainer(
            ray_worker, train_loop_config={"folder": FOLDER, "workers": sys.argv[3]},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=int(sys.argv[3])),
            run_config=RunConfig(storage_path=FOLDER),
        ).fit()  # fmt: skip


LOOPS: dict[str, Callable[[], None]] = {
    "accelerate": accelerate, "lightning": lightning, "lightning_fsdp2": lightning_fsdp2,
    "ray": ray, "transformers": transformers,
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    LOOPS[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
