"""Search for optimizers that keep a copy of the weights: the delta variant cannot reduce it.

Examples are a float32 master, torchao's copy on the host and schedule-free's `z`. The local step
computes weights from this copy, and so overwrites the reduced weights with this rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from adasum_hvd.distributed.sharding import local_of

# Their steps compute most of the weights from records that equal no weights: sums of gradients, or
# averages. Known by names, because a step does not show it.
_FROM_RECORDS = {"DAdaptAdaGrad", "FTRL", "SRMM"}
_SAMPLES = 16  # elements that are compared before all are


class Search:
    """Search for copies of the weights, in the first local step that changes some.

    A copy holds the weights before and after the step, unless the step makes it. Records of other
    times, such as MADGRAD's `x0` and Lookahead's slow weights, do not. The optimizer is searched
    `without` attributes of these names.
    """

    def __init__(self, without: Iterable[str] = ()):
        self._without = set(without)
        self._others: list[torch.Tensor] | None = None
        # Of the copies, such as "state 'z'"; None until weights have changed.
        self.places: tuple[str, ...] | None = None

    def begin(self, optimizer: Any, weights: Iterable[torch.Tensor]) -> None:
        """Note the optimizer's tensors that are no copies before the step of these weights."""
        if self.places is None:
            tensors = self._candidates(optimizer)
            pairs = [(weight, weight) for weight in weights if _is_plain(weight)]
            alike = {id(copy) for *_, copy in _alike(pairs, tensors)}
            # The tensors, not their numbers, because Python uses a freed one's number again.
            self._others = [copy for _, copy in tensors if id(copy) not in alike]

    def end(
        self, optimizer: Any, changes: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Set `places`, after the step, from each weight before and after it."""
        if self.places is not None or self._others is None:
            return
        # Only weights that differ from others: several elements, not all of them zero before.
        changed = [
            (old.to(new), new.detach())
            for old, new in changes
            if new.numel() > 1 and _is_plain(new) and bool(old.any())
        ]
        changed = [(old, new) for old, new in changed if not torch.equal(old, new)]
        if not changed:
            return
        others = set(map(id, self._others))
        tensors = self._candidates(optimizer)
        tensors = [(where, one) for where, one in tensors if id(one) not in others]
        found = {
            where
            for where, old, new, copy in _alike(changed, tensors)
            if _is_copy(copy.detach(), old, new)
        }
        if _evaluates_others(optimizer):
            found.add("eval()")
        if _steps_from_records(optimizer):
            found.add("records of all steps")
        self.places, self._others = tuple(sorted(found)), None

    def _candidates(self, optimizer: Any) -> list[tuple[str, torch.Tensor]]:
        groups = optimizer.param_groups
        own = {local_of(p.detach()).data_ptr() for one in groups for p in one["params"]}
        return [
            (where, tensor)
            for name in sorted(vars(optimizer).keys() - self._without)
            for where, tensor in _tensors(name, vars(optimizer)[name], 5)
            if tensor.data_ptr() not in own
        ]


def _alike(
    changed: Iterable[tuple[torch.Tensor, torch.Tensor]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (where, old, new, copy) if some elements of a tensor are about the new weight's."""
    by_size: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for where, tensor in tensors:
        by_size.setdefault(tensor.numel(), []).append((where, tensor))
    samples = {
        size: torch.stack([_sample(tensor) for _, tensor in several])
        for size, several in by_size.items()
    }
    for old, new in changed:
        if new.numel() not in samples:
            continue
        row, rounded = _sample(new), samples[new.numel()].to(new.dtype).double()
        tolerance = torch.finfo(new.dtype).eps * row.abs()
        for number in ((rounded - row).abs() <= tolerance).all(1).nonzero().flatten():
            where, copy = by_size[new.numel()][int(number)]
            yield where, old, new, copy


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    apart = max(1, tensor.numel() // _SAMPLES)
    return tensor.detach().flatten()[::apart][:_SAMPLES].to("cpu", torch.float64)


def _is_copy(copy: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether a tensor holds the new weights, which may be rounded at random."""
    copy = copy.reshape(new.shape).to(new)
    rounding = torch.finfo(new.dtype).eps
    is_new = torch.allclose(copy, new, rtol=rounding, atol=0)
    return is_new and not torch.equal(copy, old)


def _evaluates_others(optimizer: Any) -> bool:
    """Return whether an optimizer has `train` and `eval`, which exchange the weights."""
    # Those of a wrapper, such as accelerate's, may only call an inner optimizer's.
    if inner := _inner(optimizer):
        return any(map(_evaluates_others, inner))
    names = ("train", "eval")
    return all(callable(getattr(optimizer, name, None)) for name in names)


def _steps_from_records(optimizer: Any) -> bool:
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    inner = _inner(optimizer)
    return bool(names & _FROM_RECORDS) or any(map(_steps_from_records, inner))


def _inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    several = vars(optimizer).values()
    return [one for one in several if isinstance(one, torch.optim.Optimizer)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has dense elements of a floating dtype and torch's operators."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
    )


def _tensors(where: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (where, tensor) of plain tensors in containers, subclasses and inner optimizers."""
    if isinstance(value, torch.Tensor):
        if _is_plain(value):
            yield where, value
        elif hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(where, getattr(value, name), depth)
    elif depth and isinstance(value, torch.optim.Optimizer):
        for name, item in vars(value).items():
            yield from _tensors(f"{where}.{name}", item, depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            inner = f"{where} {key!r}" if isinstance(key, str) else where
            yield from _tensors(inner, item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(where, item, depth - 1)
