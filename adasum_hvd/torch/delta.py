"""The delta variant: local steps, then `w = w_old + AdaSum(w_new - w_old)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from adasum_hvd.torch import amp
from adasum_hvd.torch.buckets import Bucket, NamedParameter
from adasum_hvd.torch.countdown import GradientCountdown
from adasum_hvd.torch.distributed import DistributedBase, Options, StepClosure

_STATE_KEY = "adasum_delta"


class DeltaOptimizer(DistributedBase):
    """Takes the local step and reduces what it changed; parameters always hold weights."""

    _variant = "delta"

    def _configure(self, names: dict[int, str], options: Options) -> None:
        self._local_step = 0  # steps taken since the replicas were last equal
        self._countdown: GradientCountdown | None = None
        self._stepped: set[int] = set()  # buckets that overlap has stepped already
        super()._configure(names, options)

    def _make_bucket(
        self, label: str, members: Sequence[NamedParameter], process_set: Any
    ) -> Bucket:
        weights = [(name, self._weights(parameter)) for name, parameter in members]
        bucket = Bucket(
            f"weights.{label}",
            weights,
            self._wire_dtype(members[0][1]),
            self._options.op,
            (1.0, 1.0),
            process_set,
        )
        # The start is kept as the parameters are, not as they travel.
        dtype = torch.promote_types(weights[0][1].dtype, bucket.flat.dtype)
        device = "cpu" if self._options.start_copy == "host" else bucket.flat.device
        start = torch.empty(bucket.flat.shape, dtype=dtype, device=device)
        self._starts.append(start)
        pieces = start.split([view.numel() for view in bucket.views])
        self._start_views.append(
            [p.view(v.shape) for p, v in zip(pieces, bucket.views, strict=True)]
        )
        self._members.append([parameter for _, parameter in members])
        return bucket

    def _weights(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that holds the parameter's weights; steps change it in place."""
        return parameter

    def _build_buckets(self) -> None:
        if self._local_step or self._stepped:
            raise RuntimeError(
                "DistributedOptimizer: required parameters to change between reductions, got "
                f"a change {self._local_step} local steps into a window"
                + (" and after an overlapped backward" if self._stepped else "")
                + "; call step() until the window is complete first"
            )
        if self._countdown:
            self._countdown.close()
        self._starts: list[torch.Tensor] = []
        self._start_views: list[list[torch.Tensor]] = []
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
        return [*super()._own_tensors(), *self._starts]

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
        self._start_reduction(index)

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
        torch._foreach_copy_(self._start_views[index], self._buckets[index].params)

    def _start_reduction(self, index: int) -> None:
        bucket, start = self._buckets[index], self._starts[index]
        if start.dtype == bucket.flat.dtype and start.device == bucket.flat.device:
            torch._foreach_copy_(bucket.views, bucket.params)
            bucket.flat.sub_(start)
        else:
            for view, param, old in zip(
                bucket.views, bucket.params, self._start_views[index], strict=True
            ):
                view.copy_(param.to(start.dtype) - old.to(param.device))
        bucket.start()

    def _apply(self) -> None:
        """Wait for the reduced deltas and set every parameter to start + delta."""
        for bucket in self._buckets:
            bucket.finish()
        limit = self._options.clip_delta_norm
        if limit is not None and self._buckets:
            norms = [
                torch.linalg.vector_norm(b.flat.float()).cpu() for b in self._buckets
            ]
            norm = torch.linalg.vector_norm(torch.stack(norms)).item()
            for bucket in self._buckets if norm > limit else ():
                bucket.flat.mul_(limit / norm)
        for bucket, start, views in zip(
            self._buckets, self._starts, self._start_views, strict=True
        ):
            start.add_(bucket.flat.to(start.device))
            torch._foreach_copy_(bucket.params, views)

    @torch.no_grad()
    def step(self, closure: StepClosure = None) -> Any:
        """Take the local step, and on every `local_steps`-th reduce and apply the change.

        Collective on those steps: every rank of the process set; blocks.

        Raises:
            RuntimeError: torch's own GradScaler was used on several ranks, or there is
                nothing to reduce.
        """
        if self._local_step == 0:
            self._follow_parameters()
        if self._options.overlap and self._reducing:
            return self._overlapped_step(closure)
        skip = amp.must_skip(self, consistent=self._alone)
        if self._local_step == 0:
            for index in range(len(self._buckets)):
                self._keep_start(index)
        result = None if skip else super().step(closure)
        self._local_step += 1
        if self._local_step >= self._options.local_steps:
            self._local_step = 0
            for index in range(len(self._buckets)):
                self._start_reduction(index)
            self._apply()
        return result

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
        for index in range(len(self._buckets)):
            if index not in self._stepped:
                self._start_reduction(index)
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
                "starts": [start.clone() for start in self._starts],
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a state dict of a plain optimizer starts a new window."""
        state_dict = dict(state_dict)
        window = state_dict.pop(_STATE_KEY, None)
        super().load_state_dict(state_dict)
        self._local_step = window["local_step"] if window else 0
        if window:
            for start, saved in zip(self._starts, window["starts"], strict=True):
                start.copy_(saved)


# torch wraps step() with its hooks once per class; the inner optimizer's is wrapped already.
DeltaOptimizer.step.hooked = True
