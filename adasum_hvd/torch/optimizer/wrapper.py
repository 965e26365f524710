"""The user's optimizer: an instance of the user's own class with a reducer inside."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from adasum_hvd.base.frames import is_making_state, is_saving_state
from adasum_hvd.torch.objects import here
from adasum_hvd.torch.optimizer.reducer import Reducer

_STATE_KEY = "adasum_delta"
StepClosure = Callable[[], Any] | None


class DistributedWrapper(torch.optim.Optimizer):
    """Mixin before the user's optimizer class; the reducer is `_adasum`."""

    _base: type  # the user's class
    _adasum: Reducer
    _wrapped: weakref.ref[torch.optim.Optimizer]  # the original object
    param_groups: list[dict[str, Any]]
    # GradScaler then calls step() instead of skipping it on one rank alone, and leaves
    # `found_inf` and `grad_scale` here: see amp.py.
    _step_supports_amp_scaling = True

    # ---- the step ----

    @torch._disable_dynamo
    def step(self, closure: StepClosure = None) -> Any:
        """As :meth:`GradientReducer.step` or :meth:`DeltaReducer.step`. Collective; blocks."""
        arguments = [] if closure is None else [closure]
        if is_making_state():  # perhaps on one rank alone
            return super().step(*arguments)
        self._check_checkpoint()
        self._adasum.in_step = True
        try:
            result = self._adasum.step(*arguments)
        finally:
            self._adasum.in_step = False
        plain = self._wrapped()
        if plain is not None:  # read by a scheduler that was made before the wrapping
            plain._opt_called = True
        return result

    # ---- the contract of Horovod's optimizer ----

    @torch._disable_dynamo
    def synchronize(self) -> None:
        """As :meth:`GradientReducer.synchronize`; nothing in the delta variant. Collective."""
        self._adasum.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step()` use the gradients as they are, after `synchronize()`: docs/clipping.md."""
        self._adasum.skip_synchronize = True
        try:
            yield
        finally:
            self._adasum.skip_synchronize = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes a step takes, on all ranks alike, as Horovod's.

        Raises:
            ValueError: no integer of at least 1.
            RuntimeError: gradient variants, between a backward pass and `step()` or `zero_grad()`.
        """
        self._adasum.set_backward_passes_per_step(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the user's class; gradients that are being reduced are waited for and dropped.

        Collective if a backward pass has not been followed by `step()`. Warns if weights change
        and gradients are dropped without `step()`.
        """
        if not is_making_state():
            self._adasum.before_zero_grad()
            self._adasum.note_zero_grad()
        super().zero_grad(*args, **kwargs)

    # ---- state ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, between steps; the new parameters are reduced too. Collective."""
        self._adasum.check_may_change()
        super().add_param_group(param_group)
        self._adasum.parameters.name_new()
        self._adasum.rebuild()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus the start of an unfinished window of local steps.

        `torch.distributed.checkpoint` drops the start: the next step raises, unless a state is
        loaded before it.
        """
        state = super().state_dict()
        if window := self._adasum.window():
            state[_STATE_KEY] = window
            if is_saving_state():
                self._adasum.dropped_after = window["local_step"]
        return state

    def _check_checkpoint(self) -> None:
        """Raise RuntimeError, once, if a checkpoint lacks the start of the window."""
        steps, self._adasum.dropped_after = self._adasum.dropped_after, 0
        if steps:
            raise RuntimeError(
                "DistributedOptimizer: expected a checkpoint between windows of local steps, but "
                f"torch.distributed.checkpoint got a state from inside one (local step {steps}), "
                f"and drops the start of the window {here()}; save the optimizer's own "
                "state_dict() on every rank, or save after the window"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a state dict of a plain optimizer starts a new window."""
        state_dict = dict(state_dict)
        window = state_dict.pop(_STATE_KEY, None)
        super().load_state_dict(state_dict)
        plain = self._wrapped()
        # A scheduler that was made before the wrapping has the original object. Where groups are
        # a property, they are an inner optimizer's, which both objects have.
        if plain is not None and "param_groups" in vars(self):
            plain.param_groups = self.param_groups
        self._adasum.load_window(window)
        self._adasum.dropped_after = 0

    def restart(self) -> None:
        """Restart with an elastic job's current ranks, inside the same window. Collective."""
        self._adasum.restart()

    def extra_bytes(self) -> dict[str, int]:
        """Return the bytes this wrapper keeps in addition to the optimizer: "device" and "host"."""
        totals = {"device": 0, "host": 0}
        for bucket in self._adasum.flat_buckets:
            for tensor in bucket.own_tensors:
                totals["host" if tensor.is_cpu else "device"] += tensor.nbytes
        return totals

    def __reduce__(self) -> Any:
        """Copy and pickle as a plain optimizer of the user's class; not collective."""
        return _plain_copy, (self._base,), self.__getstate__()

    # ---- for scalers, monitors, wrap cells and programs that know Horovod's optimizer ----

    @property
    def _reduces_gradients(self) -> bool:
        return not self._adasum.options.is_delta

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        parameters = self._adasum.parameters
        return {parameter: parameters.name_of(parameter) for parameter in parameters}


# torch wraps step() with its hooks once per class; the inner optimizer's is wrapped already.
_step: Any = DistributedWrapper.step
_step.hooked = True


def _plain_copy(base: type) -> Any:
    """Return a plain optimizer, which gets the state of a distributed one."""
    warnings.warn(
        f"{base.__name__}: the copy of a DistributedOptimizer is a plain optimizer; wrap it to "
        "reduce with it",
        stacklevel=2,
    )
    return object.__new__(base)
