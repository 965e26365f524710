"""The noise of the ranks' gradients: the noise scale, AdaScale's gain, AdaSum's lengthening.

A noise scale is a ratio, so its numerators and denominators are averaged over records before they
are divided: a ratio of one step is biased (McCandlish et al., arXiv 1812.06162, appendix A).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Noise", "has_noise", "noise_of"]

Tensors = Mapping[str, Mapping[str, float | None]]
_NEEDED = ("variance", "squared_mean", "length", "gain")


class Noise(NamedTuple):
    """Means over records, and sums over tensors, of squared norms.

    `x_i` are the N inputs of AdaSum: the ranks' gradients, or their groups' means.
    """

    joined: int  # N
    variance: float  # E |x_i - E x_i|^2
    squared_mean: float  # |E x_i|^2; an unbiased estimate, which may be below 0
    squared_length: float  # |AdaSum|^2
    squared_average: float  # |mean of x_i|^2

    @property
    def scale(self) -> float:
        """Return the simple noise scale `variance / squared_mean`, in batches of one input.

        Infinite if no mean is left in the noise. Source: arXiv 1812.06162, equation 2.9.
        """
        if self.squared_mean > 0:
            return max(0.0, self.variance) / self.squared_mean
        return math.inf if self.variance > 0 else math.nan

    def speedup(self, workers: float) -> float:
        """Return AdaScale's gain: how many steps of one worker a step of `workers` replaces.

        `(variance + mean^2) / (variance / N + mean^2)`, from 1 to N (arXiv 2007.05105).
        """
        scale = self.scale
        return workers if math.isinf(scale) else (1 + scale) / (1 + scale / workers)

    @property
    def has_gradients(self) -> bool:
        """Return whether there is noise or a mean, and AdaSum and the mean are not 0."""
        return not (math.isnan(self.scale) or math.isnan(self.lengthening))

    @property
    def lengthening(self) -> float:
        """Return `|AdaSum| / |mean|` over all tensors together."""
        if self.squared_average > 0:
            return math.sqrt(self.squared_length / self.squared_average)
        return math.nan

    def summary(self) -> dict[str, float]:
        """Return the values that a record has in addition to its tensors'."""
        return {
            "noise_scale": self.scale,
            "adascale_gain": self.speedup(self.joined),
            "lengthening": self.lengthening,
        }


def has_noise(record: Mapping[str, Any]) -> bool:
    """Return whether a tensor of the record has all values that `noise_of` needs."""
    return any(_part(each) for each in record["tensors"].values())


def noise_of(records: Iterable[Mapping[str, Any]]) -> Noise:
    """Return the noise in a monitor's records.

    A tensor without one of the values needed, or with one that is not finite, is left out. Raises
    ValueError if no tensor of any record has all of them.
    """
    parts, count, joined = [], 0, 0
    for record in records:
        found = [part for each in record["tensors"].values() if (part := _part(each))]
        if found:
            count, joined = count + 1, int(record["joined"])
            parts += found
    if not count:
        raise ValueError(
            "noise: expected records with the values variance, squared_mean, length and gain, "
            "but got none; record the run again with this version of adasum_hvd"
        )
    columns = zip(*parts, strict=True)
    return Noise(joined, *(math.fsum(column) / count for column in columns))


def _part(tensor: Mapping[str, float | None]) -> tuple[float, ...] | None:
    """Return what a tensor adds to the sums; None if a value is missing or not finite."""
    values = [tensor.get(name) for name in _NEEDED]
    if not all(value is not None and math.isfinite(value) for value in values):
        return None
    variance, squared_mean, length, gain = (float(value or 0.0) for value in values)
    average = length / gain if gain > 0 else 0.0
    found = variance, squared_mean, length * length, average * average
    return found if all(map(math.isfinite, found)) else None
