"""The delta variant: each rank takes its own optimizer steps, and AdaSum joins weight changes.

References:
    arXiv 2006.02924, section 4; adasum_hvd/torch/optimizer/delta.py for Horovod.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from types import MethodType
from typing import Any

import torch

from adasum_hvd.base.frames import is_making_state, running
from adasum_hvd.distributed.all_reduce import checked_call
from adasum_hvd.distributed.checks import Call, agree, call_of
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.duplicate_weights import Search
from adasum_hvd.distributed.reduction import reduce_tensors
from adasum_hvd.distributed.rules import Coefficients, Ruled
from adasum_hvd.distributed.sharding import is_reduced
from adasum_hvd.distributed.units import Unit

_COLLECTIVE = {  # by class, what a step sends
    "DeMo": "gradients",
    "DistributedMuon": "updates",
    "PostLocalSGDOptimizer": "weights, to average them",
    "WSAM": "gradients",
    "ZeroRedundancyOptimizer": "the parts that they have changed",
}
_WORDS = 64  # of 8 bytes, whose order a checksum leaves out


class Windows(Ruled):
    """Windows of `every` steps, each of which ends with the reduction of the weights' changes.

    `who` reduces, for messages.
    """

    def __init__(
        self,
        who: str,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        every: int,
    ):
        self._who, self._optimizer, self._every = who, optimizer, every
        self._communicator = communicator
        self._local_step = 0  # in the window
        self._units: Sequence[Unit] = ()
        self._starts: list[torch.Tensor] = []  # of all units; empty between windows
        self._compared = communicator.size == 1  # the ranks' changes
        self._duplicates = Search()
        if self._compared or hasattr(optimizer, "refresh_master"):
            self._duplicates.places = ()
        _make_hookable(optimizer)
        optimizer.__getstate__ = MethodType(_state_of_copy, optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self._who}: expected no copy, because a copy of an optimizer has no hooks and "
            f"trains alone; save its state_dict(), or call {self._who} with the copied optimizer"
        )

    def _reduced_units(self) -> Sequence[Unit]:
        """Return the parameters that the next window reduces."""
        return self._units

    def _call(self) -> Call:
        """Return what must be the same on all ranks at a window's end."""
        return call_of([], {"local_step": self._local_step})

    @torch._disable_dynamo  # whose trace of a step has no frames to search
    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if self._is_whole(optimizer):
            self._begin_step()

    def _begin_step(self) -> None:
        if self._local_step:
            # A wrapper may have exchanged weights after its inner step.
            self._duplicates.end(self._optimizer, self._weights())
            return
        before, self._units = self._units, self._reduced_units()
        # The next step has the changes of a first one that raised, unless it has other parameters.
        if not self._starts or _numbers(before) != _numbers(self._units):
            self._starts = [*map(torch.clone, self._locals())]
            self._duplicates.begin(self._optimizer, self._starts)

    @torch._disable_dynamo
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._is_whole(optimizer):
            self._local_step += 1
            if self._local_step >= self._every:
                self.synchronize()

    def _is_whole(self, optimizer: Any) -> bool:
        """Return whether hooks run for a step of the user's, not for a part or to make state."""
        # torch runs them again when a step calls `super().step()`, and for an inner optimizer that
        # has the same hooks.
        steps = running("wrapper", "torch.optim.optimizer")
        own = [one for one in steps if one.f_locals.get("self") is optimizer]
        return optimizer is self._optimizer and len(own) == 1 and not is_making_state()

    def _locals(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(unit.locals() for unit in self._units)

    def _weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return every weight at the start of the window, if there is one, and now."""
        return zip(self._starts, self._locals(), strict=False)

    @torch.no_grad()
    def synchronize(self) -> None:
        """End the window. Collective; blocks on a CPU. After an error it never began."""
        try:
            call = self._call()
            if self._local_step and self._communicator.size > 1 and not call.problem:
                self._duplicates.end(self._optimizer, self._weights())
                names = chain.from_iterable(unit.names for unit in self._units)
                sums = checksums_of(self._starts)
                weights = tuple(zip(names, sums, strict=True))
                call = call._replace(problem=self._copy_problem(), weights=weights)
            shards = (one.communicator for unit in self._units for one in unit.shards)
            agree(self._who, call, self._communicator, dict.fromkeys(shards))
            if self._local_step:
                self._end_window()
            else:
                self._restore()  # a first step may have raised after it wrote weights
        except BaseException:
            self._restore()
            raise
        finally:
            self._local_step, self._starts = 0, []

    def _end_window(self) -> None:
        changes = [new - old for old, new in self._weights()]
        if not self._compared:
            self._compare(changes)
        self.rule.begin_pass()
        rest = iter(changes)
        for unit in self._units:
            of_unit = [*islice(rest, len(unit.names))]
            reduce_tensors(of_unit, self._communicator, self.rule, unit.shards)
        self.rule.end_pass()
        self._apply(changes)

    def _apply(self, changes: Sequence[torch.Tensor]) -> None:
        if self._communicator.size > 1:
            for (old, new), change in zip(self._weights(), changes, strict=True):
                torch.add(old, change, out=new)

    def _restore(self) -> None:
        for old, new in self._weights():
            new.copy_(old)

    def _copy_problem(self) -> Exception | None:
        if not self._duplicates.places:
            return None
        return RuntimeError(
            "expected an optimizer whose weights are the parameters alone, but got a "
            f"{type(self._optimizer).__name__} that keeps them a second time "
            f"({self._duplicates.places[0]}), where no reduction reaches them; reduce its "
            "gradients instead"
        )

    def _compare(self, changes: Sequence[torch.Tensor]) -> None:
        """Warn if the first changes that are not zero are the same on all ranks."""
        total = sum(checksums_of(changes)) % (1 << 63)
        mine = [total, any(bool(change.any()) for change in changes)]
        table = torch.tensor(mine, device=self._communicator.control_device)
        sums, changed = self._communicator.all_gather(table).unbind(1)
        self._compared = bool(changed.any())
        if self._compared and len(set(sums.tolist())) == 1:
            warnings.warn(
                f"{self._who}: expected each rank to change the weights by gradients of its own, "
                f"but the first reduction got the same change from all {self._communicator.size} "
                "ranks; run the backward passes of a DDP model inside no_sync(), and give each "
                f"rank its own data (rank {self._communicator.rank} of "
                f"{self._communicator.size})",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Take the hooks off the optimizer; the changes of an incomplete window stay local."""
        for handle in self._handles:
            handle.remove()


class _EveryStep(Windows):
    """Windows of one step, of all parameters that the optimizer has at the time."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: Any, *rule: Any):
        communicator = Communicator(group)
        check_alone("reduce_changes", optimizer, communicator.ranks)
        super().__init__("reduce_changes", optimizer, communicator, 1)
        self._arguments = rule

    def _reduced_units(self) -> Sequence[Unit]:
        by_dtype: dict[torch.dtype, list[tuple[str, Any]]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            names = group.get("param_names") or [
                f"group{number}.param{k}" for k in range(len(group["params"]))
            ]
            for name, p in zip(names, group["params"], strict=True):
                if is_reduced(p):
                    by_dtype.setdefault(p.dtype, []).append((name, p))
        pairs = (zip(*members, strict=True) for members in by_dtype.values())
        return [Unit(names, parameters, ()) for names, parameters in pairs]

    def _call(self) -> Call:
        weights = [p for unit in self._units for p in unit.parameters]
        call, _, self.rule = checked_call(weights, self._communicator, *self._arguments)
        return call


def _numbers(units: Sequence[Unit]) -> list[int]:
    return [id(parameter) for unit in units for parameter in unit.parameters]


def _make_hookable(optimizer: torch.optim.Optimizer) -> None:
    """Let a wrapper run hooks that was made without `super().__init__()`."""
    for name in ("step_pre", "step_post", "state_dict_pre"):
        vars(optimizer).setdefault(f"_optimizer_{name}_hooks", OrderedDict())
    step = optimizer.step
    if not getattr(step, "hooked", False):
        hooked = torch.optim.Optimizer.profile_hook_step(
            lambda _, *arguments, **named: step(*arguments, **named)
        )
        # Of this object alone: others of the class may have no hooks.
        optimizer.step = MethodType(hooked, optimizer)


def _windows_of(optimizer: Any) -> Iterator[Windows]:
    for hook in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values():
        if isinstance(other := getattr(hook, "__self__", None), Windows):
            yield other


def _state_of_copy(optimizer: Any) -> Any:
    """Return what copy and pickle take of an optimizer, and warn of windows that they leave out."""
    for windows in _windows_of(optimizer):
        warnings.warn(
            f"{windows._who}: the copy of its optimizer is a plain one, without hooks, and trains "
            f"alone; call {windows._who} with it to reduce its changes",
            stacklevel=2,
        )
    state = type(optimizer).__getstate__(optimizer)
    if isinstance(state, dict):
        state = {k: v for k, v in state.items() if k != "__getstate__"}
    return state


def check_alone(name: str, optimizer: Any, ranks: Sequence[int]) -> None:
    """Raise ValueError if other windows join an optimizer's changes over all of these ranks."""
    for other in _windows_of(optimizer):
        if len(ranks) > 1 and {*other._communicator.ranks} >= {*ranks}:
            raise ValueError(
                f"{name}: expected an optimizer whose changes are not reduced yet, but got one "
                f"that {other._who} reduces over the same ranks; call remove() on that first, or "
                "the function that reduce_changes has returned"
            )


def check_optimizer(name: str, optimizer: Any) -> None:
    """Raise TypeError or ValueError unless the argument is an optimizer that steps locally."""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{name}: expected a torch.optim.Optimizer, but got {kind.__name__}; create one from "
            "the model's parameters, or pass the one that a wrapper steps"
        )
    for one in kind.__mro__:
        if one.__name__ in _COLLECTIVE:
            raise ValueError(
                f"{name}: expected an optimizer that changes each rank's weights by its own "
                f"gradients, but got {one.__name__}, whose ranks send each other "
                f"{_COLLECTIVE[one.__name__]}; use adasum_hook with it, or another optimizer here"
            )


def checksums_of(tensors: Any) -> list[int]:
    """Return a checksum of the bits of each tensor, below 2**63; views cost a copy."""
    sums = [_checksum(tensor) for tensor in tensors]
    return torch.stack([one.cpu() for one in sums]).tolist() if sums else []


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all blocks' sums, each times its number: int64, in one pass."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    whole = len(data) // (8 * _WORDS) * 8 * _WORDS
    blocks = data[:whole].view(torch.int64).view(-1, _WORDS).sum(1)
    numbers = torch.cat([blocks, data[whole:].long()])
    return (numbers * torch.arange(1, len(numbers) + 1, device=data.device)).sum()


def reduce_changes(
    optimizer: torch.optim.Optimizer,
    group: Any = None,
    *,
    rule: str | Coefficients = "adasum",
    group_op: str | None = None,
    group_size: int | None = None,
) -> Callable[[], None]:
    """Make each step of an optimizer end with `w_old + AdaSum(w_new - w_old)`, from now on.

    Gradients must stay local, and weights are not broadcast: docs/distributed.md, "The delta
    variant". Parameters that are frozen, or marked with `mark_worker_local`, are left out. Sharded
    models, and several steps before a reduction: :class:`LocalSGD`.

    Args:
        optimizer: any; its state stays local. A copy of the weights is kept during a step.
        group, rule, group_op, group_size: as of `adasum_all_reduce`.

    Returns:
        A function that ends it.

    Raises:
        TypeError: the optimizer is not torch's.
        ValueError: the optimizer's own step sends weights to the other ranks, or its changes are
            reduced already. Or, from a step, as `adasum_all_reduce`: the weights are then those
            before it.
        RuntimeError: from a step, on all ranks, the same: weights before it were not the same on
            all ranks; or the optimizer keeps a copy of the weights, such as a float32 master,
            which no reduction reaches.

    Collective: steps are, from then on, and every rank takes each; they block on a CPU.
    """
    check_optimizer("reduce_changes", optimizer)
    return _EveryStep(optimizer, group, rule, group_op, group_size).remove
