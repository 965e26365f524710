"""Output of rank 0 during training: printed lines and logs."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import adasum_hvd.torch as hvd


class LossMonitor:
    """Averages the ranks' losses of an epoch without waiting for the device at each step."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Note one step's local loss, a scalar tensor."""
        self._losses.append(loss.detach())

    def results(self) -> tuple[float, float]:
        """Return the last step's and the mean loss over all ranks. Collective; blocks."""
        losses = torch.stack(self._losses).float()
        local = torch.stack([losses[-1], losses.mean()]).cpu()
        last, mean = hvd.allreduce(local, name="monitor.loss", op=hvd.Average).tolist()
        return last, mean


class Log:
    """Lines for people on stdout, and one JSON object per epoch in `path`; rank 0 only."""

    def __init__(self, path: Path | None):
        self._path = path if hvd.rank() == 0 else None

    def epoch(
        self,
        epoch: int,
        steps: int,
        seconds: float,
        images: int,
        losses: tuple[float, float],
        accuracy: float,
        lr: float,
    ) -> None:
        """Report an epoch: `steps` and `images` are those that took `seconds`."""
        last, mean = losses
        self.say(f"epoch: {epoch} step: {steps} loss is {last:.7f} (mean {mean:.7f})")
        self.say(
            f"epoch time: {seconds * 1e3:.1f} ms, per step time: "
            f"{seconds * 1e3 / steps:.1f} ms, {images / seconds:.0f} images/s"
        )
        self.say(f"epoch: {epoch} accuracy {accuracy:.4f} lr {lr:.5f}")
        if self._path:
            row = {
                "epoch": epoch,
                "steps": steps,
                "loss": last,
                "mean_loss": mean,
                "accuracy": accuracy,
                "lr": lr,
                "seconds": seconds,
            }
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if hvd.rank() == 0:
            print(line, flush=True)
