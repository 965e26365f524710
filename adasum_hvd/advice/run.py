"""Advice from a run's own records: does AdaSum help it, and how many workers are useful?"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adasum_hvd.advice.learning_rate import study_of
from adasum_hvd.common import ops
from adasum_hvd.monitor.files import records as records_of
from adasum_hvd.monitor.noise import has_noise, noise_of

__all__ = ["Advice", "advise"]

# Below these lengthenings AdaSum and Average take the same number of steps in the runs. Adam
# divides a gradient by its size: a lengthening of 8 and more saves a tenth of the steps, and one
# of 5 none.
CLEARLY_LONGER = {"momentum": 1.5, "adam": 7.0, "adamw": 7.0}


class Advice(NamedTuple):
    """An answer, and the figures that it rests on. `str` returns the answer in words.

    Attributes:
        use: the reduction for one worker's learning rate: `AdasumGrad`, or `Average` if it is as
            good.
        workers: N, the number of AdaSum's inputs in the run.
        speedup: a bound, in theory, of the factor by which N workers take fewer steps than one: the
            mean of AdaScale's gain over the records.
        noise_scale: of the run, in batches of one worker: the noise scale whose gain is
            `speedup`; infinite if no common gradient is visible in the noise.
        lengthening: `|AdaSum| / |mean|` over all tensors, the mean over the records.
        answer: sentences.
    """

    use: ops.ReduceOp
    workers: int
    speedup: float
    noise_scale: float
    lengthening: float
    answer: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.answer)


def advise(
    run: str | os.PathLike[str] | Sequence[Mapping[str, Any]], *, optimizer: object
) -> Advice:
    """Return what the records of a run say about workers, rates and AdaSum.

    AdaScale's gain is the number of one worker's steps that a step of N workers replaces, so its
    mean over a run predicts the steps. AdaSum's lengthening is the multiple of the rate at which
    an average takes steps of the same length. docs/convergence.md compares both with runs, and
    has the reasons for the choice of a reduction.

    Args:
        run: a file that `AdasumMonitor` has written, of which the latest run counts; or its
            records.
        optimizer: the run's optimizer or its class, or the study that fits it: "momentum" (SGD),
            "adam" or "adamw".

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no records, or records without noise; the study is unknown.

    Example:
        >>> tensor = {"variance": 40.0, "squared_mean": 1.0, "length": 8.0, "gain": 5.0}
        >>> records = [{"joined": 32, "inputs": "gradients", "tensors": {"weight": tensor}}]
        >>> advice = advise(records, optimizer="momentum")
        >>> advice.use.name, round(advice.speedup, 1), round(advice.noise_scale)
        ('AdasumGrad', 18.2, 40)

    References:
        arXiv 1812.06162, section 2 and appendix A; arXiv 2007.05105; docs/monitor.md.
    """
    if isinstance(run, str | os.PathLike):
        run = records_of(Path(run))
    study = study_of(optimizer)
    run = [record for record in run if has_noise(record)]
    each = [noise_of([record]) for record in run] or [noise_of(run)]
    workers = each[-1].joined
    speedup = statistics.mean(noise.speedup(workers) for noise in each)
    lengthening = statistics.mean(
        noise.lengthening for noise in each if not math.isnan(noise.lengthening)
    )
    longer = lengthening >= CLEARLY_LONGER[study]
    scale = scale_of(speedup, workers)
    answer = [
        _steps_sentence(speedup, workers, scale),
        _noise_sentence(run),
        _length_sentence(lengthening, speedup, study),
        _choice(study, longer),
    ]
    if any(record.get("inputs") == "changes" for record in run):
        answer.append(
            "The records are of weight changes, which an optimizer has smoothed: their noise is "
            "smaller than the gradients'. Record AdasumGrad for a noise scale of gradients."
        )
    use = ops.AdasumGrad if longer else ops.Average
    return Advice(use, workers, speedup, scale, lengthening, tuple(answer))


def scale_of(speedup: float, workers: int) -> float:
    """Return the noise scale at which `workers` take `speedup` times fewer steps."""
    return math.inf if speedup >= workers else (speedup - 1) / (1 - speedup / workers)


def _number(value: float) -> str:
    return "more than can be measured" if math.isinf(value) else f"{value:.3g}"


def _steps_sentence(speedup: float, workers: int, scale: float) -> str:
    text = (
        f"With {workers} workers, expect up to {speedup:.3g} times fewer steps than with one "
        f"({speedup / workers:.0%} of perfect scaling)"
    )
    if math.isinf(scale):
        return f"{text}. More workers are worth adding."
    useful = max(1, round(scale))
    return (
        f"{text}. Up to about {useful} {'worker is' if useful == 1 else 'workers are'} worth "
        "having: beyond it, twice the workers save less than a quarter of the steps."
    )


def _noise_sentence(run: Sequence[Mapping[str, Any]]) -> str:
    third = len(run) // 3
    if not third:
        return (
            f"The noise scale is {_number(noise_of(run).scale)} batches of one worker."
        )
    early, late = noise_of(run[:third]), noise_of(run[-third:])
    return (
        f"The noise scale is {_number(early.scale)} batches of one worker in the first third of "
        f"the run, and {_number(late.scale)} in the last."
    )


def _length_sentence(lengthening: float, speedup: float, study: str) -> str:
    times = f"{lengthening:.3g} times"
    if study != "momentum":
        return (
            f"AdaSum is {times} as long as the mean, but Adam divides a gradient by its size: most "
            "of that factor is lost."
        )
    return (
        f"AdaSum's steps are {times} as long as the mean's: AdaSum acts like Average at {times} "
        f"the learning rate. AdaScale would multiply the rate by {speedup:.3g}."
    )


def _choice(study: str, longer: bool) -> str:
    adam = study != "momentum"
    if longer and adam:
        return (
            "At one worker's learning rate use AdasumGrad: in docs/convergence.md it takes about "
            "a tenth fewer steps than Average. A rate that is tuned again gains more, with both."
        )
    if longer:
        return (
            "At one worker's learning rate use AdasumGrad: Average's steps would be too short. "
            "AdaScale keeps that rate, too. An Average or LARS whose rate is tuned again may be "
            "as good or better: docs/convergence.md."
        )
    if adam:
        return (
            "Use Average: it is as good in the runs of docs/convergence.md, where AdaSum is not "
            "longer than here."
        )
    return (
        "Use Average: AdaSum's steps are hardly longer with this number of workers, and the two "
        "are equal in the runs of docs/convergence.md."
    )
