"""The delta variant: local steps, then `w = w_old + AdaSum(w_new - w_old)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from adasum_hvd import ops
from adasum_hvd.torch import amp
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.buckets import NamedParameter
from adasum_hvd.torch.countdown import GradientCountdown
from adasum_hvd.torch.delta_buckets import ChangeBucket, change_bucket
from adasum_hvd.torch.distributed import DistributedBase, Options, StepClosure

_STATE_KEY = "adasum_delta"


class DeltaOptimizer(DistributedBase):
    """Takes the local step and reduces what it changed; parameters always hold weights."""

    _variant = "delta"
    _buckets: list[ChangeBucket]  # type: ignore[assignment]  # lists are invariant

    def _configure(self, names: dict[int, str], options: Options) -> None:
        self._local_step = 0  # steps taken since the replicas were last equal
        self._countdown: GradientCountdown | None = None
        self._stepped: set[int] = set()  # buckets that overlap has stepped already
        self._scaled = False  # a gradient scaler called this step()
        self.change_overflowed = False  # read and cleared by hvd.GradScaler
        super()._configure(names, options)

    def _make_bucket(
        self, label: str, members: Sequence[NamedParameter], process_set: Any
    ) -> ChangeBucket:
        self._members.append([parameter for _, parameter in members])
        return change_bucket(
            f"weights.{label}",
            [(name, self._weights(parameter)) for name, parameter in members],
            self._wire_dtype(members[0][1]),
            self._options,
            process_set,
        )

    def _weights(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that holds the parameter's weights; steps change it in place."""
        return parameter

    def _check_may_change(self) -> None:
        if self._local_step or self._stepped:
            raise RuntimeError(
                "DistributedOptimizer: required parameters to change between reductions, got "
                f"a change {self._local_step} local steps into a window"
                + (" and after an overlapped backward" if self._stepped else "")
                + "; call step() until the window is complete first"
            )

    def _build_buckets(self) -> None:
        self._check_may_change()
        if self._countdown:
            self._countdown.close()
        self._members: list[list[torch.Tensor]] = []  # parameters by bucket
        super()._build_buckets()
        if self._options.overlap:
            self._countdown = GradientCountdown(
                self._members,
                self._options.backward_passes_per_step,
                self._name_of,
                self._step_bucket,
            )

    def _own_tensors(self) -> Iterable[torch.Tensor]:
        starts = (b.start_weights for b in self._buckets if not b.flat_is_start)
        return [*super()._own_tensors(), *starts]

    # ---- overlap: a bucket is stepped as soon as its gradients are complete ----

    def _reset_overlap(self) -> None:
        if self._countdown:
            self._countdown.reset()
        self._stepped.clear()

    @torch.no_grad()
    def _step_bucket(self, index: int) -> None:
        self._keep_start(index)
        self._step_only(set(self._members[index]))
        self._stepped.add(index)
        self._buckets[index].start()

    def _step_only(self, parameters: set[torch.Tensor]) -> None:
        everything = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [p for p in group["params"] if p in parameters]
            super().step()
        finally:
            for group, params in zip(self.param_groups, everything, strict=True):
                group["params"] = params

    def _step_rest(self, parameters: set[torch.Tensor]) -> None:
        self._step_only(parameters)

    # ---- the step ----

    def _keep_start(self, index: int) -> None:
        self._buckets[index].keep()

    def _apply(self) -> None:
        """Wait for the reduced changes and set every parameter to start + change.

        Under a gradient scaler a change that is not finite (float16 on the wire overflows
        where the gradients did not) is dropped, and the scaler told.
        """
        try:
            for bucket in self._buckets:
                bucket.finish()
        except Exception:
            self._restore()
            raise
        if self._scaled and self._reducing and not self._changes_are_finite():
            self._restore()
            self.change_overflowed = True
            return
        limit = self._options.clip_delta_norm
        if limit is not None and self._buckets:
            norms = [
                torch.linalg.vector_norm(b.flat.float()).cpu() for b in self._buckets
            ]
            norm = torch.linalg.vector_norm(torch.stack(norms)).item()
            for bucket in self._buckets if norm > limit else ():
                bucket.flat.mul_(limit / norm)
        for bucket in self._buckets:
            bucket.apply()

    def _changes_are_finite(self) -> bool:
        """Return whether all reduced changes are finite, the same on all ranks."""
        largest = [bucket.largest().double().cpu() for bucket in self._buckets]
        finite = torch.isfinite(torch.stack(largest)).all()
        if self._any_partial:  # not all ranks have reduced the same
            finite = torch_ops.allreduce(
                finite.double().reshape(1),
                name=f"adasum.change_is_finite.{self._instance}",
                op=ops.Min,
                process_set=self._options.process_set,
            )
        return bool(finite)

    @torch.no_grad()
    def step(self, closure: StepClosure = None) -> Any:
        """Take the local step, and on every `local_steps`-th reduce and apply the change.

        Collective on those steps: every rank of the process set; blocks.

        Raises:
            RuntimeError: torch's own GradScaler was used on several ranks, or there is
                nothing to reduce.
        """
        self._follow_parameters()
        self._drop_frozen_gradients()
        if self._options.overlap and self._reducing:
            return self._overlapped_step(closure)
        self._scaled = getattr(self, "found_inf", None) is not None
        skip = amp.must_skip(self, consistent=self._alone)
        if self._local_step == 0:
            for index in range(len(self._buckets)):
                self._keep_start(index)
        result = None if skip else super().step(closure)
        self._local_step += 1
        if self._local_step >= self._options.local_steps:
            self._local_step = 0
            self._start(range(len(self._buckets)))
            self._apply()
        return result

    def _start(self, indices: Iterable[int]) -> None:
        """Start the reduction of buckets, of all or, where one cannot, of none."""
        try:
            for index in indices:
                self._buckets[index].start()
        except Exception:
            for bucket in self._buckets:
                if bucket.in_flight:
                    bucket.finish()
            self._restore()
            raise

    def _restore(self) -> None:
        """Set every parameter to the start."""
        for bucket in self._buckets:
            bucket.restore()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's.

        Raises:
            RuntimeError: overlap has already stepped with these gradients.
        """
        if self._stepped:
            raise RuntimeError(
                "zero_grad(): required step() after a backward pass with overlap=True, got "
                "none; the gradients have been applied already and cannot be dropped"
            )
        self._reset_overlap()
        super().zero_grad(set_to_none)

    def _overlapped_step(self, closure: StepClosure) -> Any:
        amp.refuse_with_overlap(self)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        rest = {p for group in self.param_groups for p in group["params"]}
        for index in range(len(self._buckets)):
            if index in self._stepped:
                rest -= set(self._members[index])
            else:
                self._keep_start(index)
        self._step_rest(rest)
        self._start(i for i in range(len(self._buckets)) if i not in self._stepped)
        self._apply()
        self._reset_overlap()
        return result

    def __reduce__(self) -> Any:
        """As the base's; not inside a window of local steps, where only state_dict will do."""
        if self._local_step:
            raise RuntimeError(
                "copying a DistributedOptimizer: required a complete window of local_steps, got "
                f"{self._local_step} of {self._options.local_steps}; use state_dict(), which "
                "holds the window's start"
            )
        return super().__reduce__()

    # ---- resume inside a window of local steps ----

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus the start of an unfinished window of local steps."""
        state = super().state_dict()
        if self._local_step:
            state[_STATE_KEY] = {
                "local_step": self._local_step,
                "starts": [b.start_weights.clone() for b in self._buckets],
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a state dict of a plain optimizer starts a new window."""
        state_dict = dict(state_dict)
        window = state_dict.pop(_STATE_KEY, None)
        super().load_state_dict(state_dict)
        self._local_step = window["local_step"] if window else 0
        if window:
            for bucket, saved in zip(self._buckets, window["starts"], strict=True):
                bucket.start_weights.copy_(saved)


# torch wraps step() with its hooks once per class; the inner optimizer's is wrapped already.
DeltaOptimizer.step.hooked = True
