"""Advice from a run's own records: does AdaSum help it, and how many workers are useful?"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from adasum_hvd.advice.convergence_results import FIGURES, RIVALS, ratio
from adasum_hvd.advice.learning_rate import study_of
from adasum_hvd.base import ops
from adasum_hvd.monitor.files import check
from adasum_hvd.monitor.files import records as records_of
from adasum_hvd.monitor.noise import Noise, has_noise, noise_of

__all__ = ["Advice", "advise"]

Record: TypeAlias = Mapping[str, Any]

# Below these lengthenings AdaSum and Average take the same number of steps in the runs. Adam
# divides a gradient by its size: a lengthening of 8 and more saves a tenth of the steps, and one
# of 5 none.
CLEARLY_LONGER = {"momentum": 1.5, "adam": 7.0, "adamw": 7.0}
PARTS = 3  # of a run: the noise scale changes during a run, and few records estimate it poorly
FEW = 30  # records; the runs' own, of 8 to 13, are wrong by up to a factor of 3


class Advice(NamedTuple):
    """An answer, and the figures that it rests on. `str` returns the answer in words.

    Attributes:
        use: the reduction for one worker's learning rate: `AdasumGrad`, or `Average` if it is as
            good.
        workers: N, the number of AdaSum's inputs in the run: ranks, or groups of ranks.
        speedup: an estimate of the factor by which N workers take fewer steps than one: the mean of
            AdaScale's gain over three parts of the run.
        noise_scale: of the run, in batches of one worker: the noise scale whose gain is
            `speedup`; infinite if no common gradient is visible in the noise.
        lengthening: `|AdaSum| / |mean|` over all tensors, the mean over the three parts.
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
    run: str | os.PathLike[str] | Sequence[Record], *, optimizer: object
) -> Advice:
    """Return what the records of a run say about workers, rates and AdaSum.

    The mean of AdaScale's gain over a run predicts the steps. It comes from a noise scale for each
    third of the run: that of a whole run is mostly that of the steps with large gradients.
    docs/monitor.md explains the answer, and docs/convergence.md compares it with runs.

    Args:
        run: a file that `AdasumMonitor` has written, of which the latest run counts; or its
            records. Values that are not finite are left out.
        optimizer: the run's optimizer or its class, or the study that fits it: "momentum" (SGD),
            "adam" or "adamw".

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no records, or records without noise, of one worker or of several numbers
            of workers; no study fits the optimizer.

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
    run = list(run)
    for number, record in enumerate(run, 1):
        check(record, f"record {number}")
    study = study_of(optimizer)
    run = [record for record in run if has_noise(record)]
    parts = [noise for noise in map(noise_of, _parts(run)) if noise.has_gradients]
    if not parts:
        raise ValueError(
            "advise: expected records of gradients, but got zeros in all of them; record steps in "
            "which the model learns"
        )
    workers = _workers(run)
    speedup = statistics.mean(noise.speedup(workers) for noise in parts)
    lengthening = statistics.mean(noise.lengthening for noise in parts)
    longer = lengthening >= CLEARLY_LONGER[study]
    scale = scale_of(speedup, workers)
    answer = [
        _steps_sentence(speedup, _named(run[-1], workers), workers, scale),
        _noise_sentence(parts),
        _length_sentence(lengthening, speedup, study),
        _choice(study, longer),
        *([_rules_sentence(study, workers)] if longer else []),
    ]
    count = f"{len(run)} {'record' if len(run) == 1 else 'records'}"
    answer.append(
        "This rests on one run. In docs/convergence.md such an estimate was off by more than 15% "
        "in two of five runs."
        if len(run) >= FEW
        else f"This rests on {count}, and may be wrong by a factor of 2: record {FEW} and more."
    )
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


def _parts(run: Sequence[Record]) -> list[Sequence[Record]]:
    """Return the run in PARTS of consecutive records, or fewer if there are fewer records."""
    count = max(1, min(PARTS, len(run)))
    ends = [len(run) * part // count for part in range(count + 1)]
    return [run[begin:end] for begin, end in itertools.pairwise(ends)]


def _workers(run: Sequence[Record]) -> int:
    """Return the number of inputs, which is the same in all records."""
    counts = sorted({int(record["joined"]) for record in run})
    if len(counts) > 1 or counts[0] < 2:
        raise ValueError(
            "advise: expected records of one number of workers, 2 or more, but got "
            f"{', '.join(map(str, counts))}; pass the records of one run of several workers"
        )
    return counts[0]


def _named(record: Record, workers: int) -> str:
    size = int(record.get("ranks") or workers) // workers
    return f"{workers} groups of {size} ranks" if size > 1 else f"{workers} workers"


def _number(value: float) -> str:
    return "too large to measure" if math.isinf(value) else f"{value:.3g}"


def _steps_sentence(speedup: float, named: str, workers: int, scale: float) -> str:
    one = "group" if "groups" in named else "worker"
    text = (
        f"With {named}, expect about {speedup:.3g} times fewer steps than with one {one} "
        f"({speedup / workers:.0%} of perfect scaling)"
    )
    if scale >= 4 * workers:
        more = f"More {one}s are worth adding: twice as many save at least 40% of the steps"
        return f"{text}. {more}."
    useful = max(1, round(scale))
    return (
        f"{text}. Up to about {useful} {one}{' is' if useful == 1 else 's are'} worth "
        f"having: beyond it, twice the {one}s save less than a quarter of the steps."
    )


def _noise_sentence(parts: Sequence[Noise]) -> str:
    scales = [_number(noise.scale) for noise in parts]
    if len(scales) < PARTS:
        return f"The noise scale, in batches of one worker, is {scales[0]}."
    return (
        f"The noise scale, in batches of one worker, is {scales[0]} in the first third of the run "
        f"and {scales[-1]} in the last."
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
    runs = "the runs of docs/convergence.md"
    if study == "adam":
        runs += " with AdamW (none compares the two with Adam)"
    if study != "momentum":
        if longer:
            return (
                "At one worker's learning rate use AdasumGrad: it takes about a tenth fewer steps "
                f"than Average in {runs}. A rate that is tuned again gains more, with both."
            )
        return (
            f"Use Average: it is as good in {runs}, wherever AdaSum is less than "
            f"{CLEARLY_LONGER[study]:.3g} times as long as the mean."
        )
    if longer:
        return (
            "At one worker's learning rate use AdasumGrad: Average's steps would be too short. "
            "An Average or LARS whose rate is tuned again may be "
            "as good or better: docs/convergence.md."
        )
    return (
        "Use Average: AdaSum's steps are hardly longer, so the two are nearly the same reduction. "
        f"None of {runs} has a factor below 1.8, so no run has tested this answer."
    )


def _rules_sentence(study: str, workers: int) -> str:
    """Return the study's row at one worker's rate, and which rules of it needed fewest steps."""
    study = "adamw" if study == "adam" else study
    near = min(RIVALS[study], key=lambda count: ratio(count, workers))
    row: dict[str, tuple[float, float]] = {**RIVALS[study][near]}
    for rule, op in (("adasum", ops.AdasumGrad), ("mean", ops.Average)):
        (own,) = (row for row in FIGURES[study].rows[op] if row.workers == near)
        if own.unscaled is not None and own.unscaled_deviation is not None:
            row[rule] = own.unscaled, own.unscaled_deviation
    rules = sorted(row, key=lambda rule: row[rule])
    least, deviation = row[rules[0]]
    won = [r for r in rules if row[r][0] - least <= max(row[r][1], deviation)]
    shown = ", ".join(f"{rule} {row[rule][0]} ± {row[rule][1]}" for rule in rules)
    return (
        f"The nearest row of docs/convergence.md has {near} workers ({FIGURES[study].unit}, at "
        f"that rate, by rule= of AdasumState). Best or equal: {', '.join(won)}. All: {shown}."
    )
