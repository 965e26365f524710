"""Checkpoints: one file per rank, for the delta variant's optimizer state is local.

A folder holds `step-N/rank-K.pt` and `latest`, which names a step only after all ranks have
written it. The folder is shared, or each host has its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

import adasum_hvd.torch as hvd

Result = TypeVar("Result")


def on_all_ranks(what: str, function: Callable[[], Result]) -> Result:
    """Return `function()`, or raise on every rank when it fails on one. Collective; blocks.

    Raises:
        RuntimeError: the first failing rank's error.
    """
    error, result = "", None
    try:
        result = function()
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    failures = {
        rank: text for rank, text in enumerate(hvd.allgather_object(error)) if text
    }
    if failures:
        rank, text = next(iter(failures.items()))
        raise RuntimeError(
            f"{what} failed on {len(failures)} of {hvd.size()} ranks, first on rank {rank}: "
            f"{text}"
        )
    return result  # type: ignore[return-value]


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step}" / f"rank-{hvd.rank()}.pt"


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write `state`, this rank's, as the checkpoint after `step` steps. Collective; blocks."""

    def write() -> None:
        file = _file(folder, step)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, file)

    def point() -> None:
        if hvd.local_rank() == 0:
            new = folder / f"latest.{hvd.rank()}"
            new.write_text(str(step))
            os.replace(new, folder / "latest")

    on_all_ranks("checkpoint", write)
    on_all_ranks("checkpoint", point)
    if hvd.local_rank() == 0:
        for old in folder.glob("step-*"):
            if old.name != f"step-{step}":
                shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """Return this rank's latest state, or None where there is none. Collective; blocks.

    Args:
        folder: as for :func:`save`.
        run: what must be equal in the saved state's "run", such as the number of ranks.

    Raises:
        RuntimeError: on all ranks: a file is missing or broken, the ranks are at different
            steps, or the checkpoint is of another run.
    """

    def latest() -> int | None:
        pointer = folder / "latest"
        return int(pointer.read_text()) if pointer.exists() else None

    step = on_all_ranks("resume", latest)
    steps = hvd.allgather_object(step)
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"resume: expected the same checkpoint on all ranks, but got steps {steps}; share "
            f"{folder} between the hosts, or copy it"
        )
    if step is None:
        return None

    def read() -> dict[str, Any]:
        state = torch.load(_file(folder, step), map_location="cpu", weights_only=True)
        for name, value in run.items():
            if state["run"].get(name) != value:
                raise ValueError(
                    f"expected a checkpoint of {name}={value!r}, but got {state['run'].get(name)!r}"
                )
        return state

    return on_all_ranks("resume", read)
