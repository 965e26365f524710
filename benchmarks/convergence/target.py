"""One run of study 7: how many steps a setting takes to its target."""

from __future__ import annotations

import functools
import math
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from adasum_hvd.distributed.coefficients import adasum, lengths
from convergence.reductions import gram
from convergence.training import Job, Setting, noise

SPACING = 1.08  # from one judged step to the next, so that a figure is right to 8 %
FAR = 0.1  # if the first images are so far below the target, the others are not judged
KEPT = 12  # points of a run's curve, and of its gradients' noise


def train_to_target(setting: Setting) -> dict[str, Any]:
    """Return the record of a run.

    Its fields, next to the setting's that are not defaults: `steps_to_target`, the first judged
    step at which the split's accuracy or loss reaches the target (None: not within the run),
    `horizon`, the step at which the budget is used up, `level`, the accuracy or minus the loss
    at that step, `steps`, `curve` of (step, level), `noise` of (step, sum |g_i|^2, |mean g|^2,
    |AdaSum|^2), `diverged`, `seconds` of processor time, and `code`.
    """
    began = time.process_time()
    job = Job(setting)
    batch = setting.batch or job.work.batch
    horizon = job.horizon(setting.workers)
    most = max(horizon, setting.most_steps)
    record: dict[str, Any] = {**non_defaults(setting), "steps_to_target": None}
    record |= {"horizon": horizon, "level": None, "curve": [], "noise": []}
    judged = judged_steps(most, horizon)
    draws = job.work.draws(setting.seed, setting.workers, batch)
    for step, examples in enumerate(draws, 1):
        look = step in judged
        if look and setting.workers > 1 and judged[step]:
            record["noise"].append([step, *_noise(job, examples)])
        job.step(examples, setting.lr * job.warm_up(), look=False)
        keep = judged.get(step, False)
        unknown = look and record["steps_to_target"] is None
        level = 0.0
        if keep or unknown:
            level = job.work.level(job.model, 0.0 if keep else setting.target - FAR)
        if look and not is_finite(job, level):
            record["diverged"] = step
            break
        if keep or unknown:
            _note(record, setting, step, level, keep)
        if step >= most or (step >= horizon and record["steps_to_target"]):
            break
    record |= {"steps": step, "seconds": round(time.process_time() - began, 2)}
    return record | {"code": version()}


def judged_steps(most: int, horizon: int) -> dict[int, bool]:
    """Return the steps at which a run is judged, and which of them its record keeps.

    They begin at a fiftieth of the run, before which no run reaches its target.
    """
    steps = {most, horizon}
    step = max(1.0, most / 50)
    while step < most:
        steps.add(math.ceil(step))
        step *= SPACING
    ordered = sorted(steps)
    every = math.ceil(len(ordered) / KEPT)
    return {
        each: k % every == 0 or each in (most, horizon)
        for k, each in enumerate(ordered)
    }


def non_defaults(setting: Setting) -> dict[str, Any]:
    """Return the fields that are not their defaults; all of them would fill the raw file."""
    plain = {field.name: field.default for field in fields(setting)}
    return {k: v for k, v in asdict(setting).items() if v != plain[k]}


def reaches(level: float, target: float) -> bool:
    """Return whether a level is at least an accuracy, or at most a loss, which is above 1."""
    return level >= target if target <= 1 else -level <= target


@functools.cache
def version() -> str:
    """Return git's name of this folder's contents, which `git log` finds; "+" if changed."""
    folder = Path(__file__).parent
    try:
        name = _git(folder, "rev-parse", "--short=12", "HEAD:./")
        return name + ("+" if _git(folder, "status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def _note(
    record: dict[str, Any], setting: Setting, step: int, level: float, keep: bool
) -> None:
    level = round(level, 5)
    if record["steps_to_target"] is None and reaches(level, setting.target):
        record["steps_to_target"] = step
    if step == record["horizon"]:
        record["level"] = level
    if keep:
        record["curve"].append([step, level])


def _noise(job: Job, examples: Sequence[torch.Tensor]) -> list[float]:
    """Return three squared norms of this step's gradients at the weights that all agree on."""
    gradients = job.workers.alike(examples)
    products = gram(gradients)
    combined = float(lengths(products, adasum(products)).square().sum())
    return [float(f"{each:.5g}") for each in (*noise(gradients), combined)]


def is_finite(job: Job, level: float = 0.0) -> bool:
    """Return whether a level and all weights are finite."""
    return math.isfinite(level) and all(
        bool(torch.isfinite(tensor).all()) for tensor in job.agreed
    )
