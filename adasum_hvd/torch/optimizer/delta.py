"""The delta variant: local steps, then `w = w_old + AdaSum(w_new - w_old)`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from adasum_hvd.common import ops
from adasum_hvd.common.options import Options, ProcessSet
from adasum_hvd.torch import amp, wire
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.broadcasting import broadcast_parameters
from adasum_hvd.torch.optimizer import weight_copies
from adasum_hvd.torch.optimizer.base import DistributedBase, StepClosure
from adasum_hvd.torch.optimizer.buckets import NamedParameter
from adasum_hvd.torch.optimizer.delta_buckets import (
    ChangeBucket,
    change_bucket,
    is_rounding,
)
from adasum_hvd.torch.optimizer.rounds import Rounds, bits_of, epoch

_STATE_KEY = "adasum_delta"
# Hyperparameters that a rank may have of its own: its learning rates, and which code computes.
_OF_A_RANK = re.compile(r"(\b|_)lr$|\b(foreach|fused|capturable|differentiable)$")


def _wide(weights: torch.Tensor) -> torch.Tensor:
    """Return weights in a dtype in which they can be compared: in 16 bits a unit is too much."""
    return weights.float() if weights.itemsize < 4 else weights


class DeltaOptimizer(DistributedBase):
    """Takes the local step and reduces what it changed; parameters always hold weights."""

    _reduces_gradients = False
    _buckets: list[ChangeBucket]  # type: ignore[assignment]  # lists are invariant

    def _configure(
        self, plain: torch.optim.Optimizer, names: dict[int, str], options: Options
    ) -> None:
        self._local_step = 0  # steps taken since the replicas were last equal
        self._waiting: dict[str, Any] | None = None  # a window, for the next buckets
        super()._configure(plain, names, options)

    def _connect(self) -> None:
        self._scaled = False  # a gradient scaler called this step()
        self._replaced = False  # weights took the place of those that all agreed on
        self._epoch: int | None = None  # in which all ranks have agreed on a start
        self._stepped_here = self._looked_for_copies = False
        self.change_overflowed = False  # read and cleared by hvd.GradScaler
        super()._connect()

    def _make_bucket(
        self, label: str, members: Sequence[NamedParameter], process_set: ProcessSet
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
        if self._local_step:
            raise RuntimeError(
                "DistributedOptimizer: required parameters to change between reductions, got "
                f"a change {self._local_step} local steps into a window"
                "; call step() until the window is complete first"
            )

    def _announce_change(self, rounds: Rounds) -> None:
        """Send another dtype under the names of the messages that the other ranks send next.

        Horovod then reports to all ranks that the dtypes differ.
        """
        self._check_may_change()
        if self._epoch != epoch():
            names = [rounds.message_name("start")]
        elif not self._looked_for_copies:
            names = [rounds.message_name("weight_copies")]
        elif rounds.is_due:
            names = [rounds.message_name("next")]
        else:
            names = [
                bucket.entry.removeprefix("allreduce.")
                for bucket in self._common_buckets
            ]
        none = torch.zeros(1, dtype=torch.int64)
        process_set = self._options.process_set
        handles = [
            torch_ops.allreduce_async(
                none, name=name, op=ops.Sum, process_set=process_set
            )
            for name in names
        ]
        for handle in handles:
            with suppress(HorovodInternalError):  # the buckets' comparison says more
                wire.synchronize(handle)

    def _build_buckets(self) -> None:
        self._check_may_change()
        self._members: list[list[torch.Tensor]] = []  # parameters by bucket
        super()._build_buckets()

    def _own_tensors(self) -> Iterable[torch.Tensor]:
        starts = (b.start_weights for b in self._buckets if not b.flat_is_start)
        return [*super()._own_tensors(), *starts]

    # ---- the step ----

    def _begin_window(self) -> None:
        """Note where all ranks start."""
        first = self._epoch != epoch()  # or the first since some ranks had joined
        for index in range(len(self._buckets)):
            self._replaced |= self._keep_start(index)
        if first and self._rounds is not None:
            self._agree_on_start(self._rounds)
            self._replaced = False
        self._epoch = epoch()

    def _agree_on_start(self, rounds: Rounds) -> None:
        """Take the first rank's start where this rank's is another one by rounding. Collective.

        Raises:
            RuntimeError: on any rank it is another one by more; on every rank.
        """
        starts = self._common_starts()
        bits = rounds.ask("start", bits_of(starts))
        if len(set(bits.values())) == 1:
            return
        root, own = min(bits), [start.clone() for start in starts]
        broadcast_parameters(starts, root, self._options.process_set)
        pairs = zip(map(_wide, own), map(_wide, starts), strict=True)
        far = not all(is_rounding(mine, agreed) for mine, agreed in pairs)
        others = [rank for rank, is_far in rounds.ask("far", far).items() if is_far]
        if others:
            raise RuntimeError(
                "DistributedOptimizer: required the same weights on all ranks before the first "
                f"step, got others on ranks {others} than on rank {root} (this is rank "
                f"{mpi_ops.rank()}); call broadcast_parameters(model.state_dict(), root_rank="
                f"{root}), or mark_worker_local() what is a rank's own"
            )

    def _common_starts(self) -> list[torch.Tensor]:
        return [bucket.start_weights for bucket in self._common_buckets]

    def _keep_start(self, index: int) -> bool:
        """Note a bucket's start; return whether it is another one than all agreed on."""
        return self._buckets[index].open()

    def _settings(self, first: bool) -> dict[str, Any]:
        """Return what has to be the same in the first step; schedules may then differ."""
        if not first:
            return {}
        everything = super()._settings(first)
        return {n: v for n, v in everything.items() if not _OF_A_RANK.search(n)}

    def _has_news(self) -> bool:
        return self._replaced

    def _hear_news(self) -> None:
        """Compare the starts: weights were changed between steps since the last question."""
        self._replaced = False
        assert self._rounds is not None
        bits = self._rounds.ask("changed", bits_of(self._common_starts()))
        if len(set(bits.values())) > 1:
            raise RuntimeError(
                "DistributedOptimizer: required the same weights on all ranks at the start "
                f"of a step, got others after a change between steps (this is rank "
                f"{mpi_ops.rank()}); change them alike on all ranks, bit for bit, or "
                "broadcast_parameters() afterwards; where they were moved for a moment, "
                "put back a copy"
            )

    def _apply(self) -> None:
        """Wait for the reduced changes and set every parameter to start + change.

        Under a gradient scaler a change that is not finite (float16 on the wire overflows
        where the gradients did not) is dropped, and the scaler told.
        """
        for bucket in self._buckets:
            bucket.finish()
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

        Hooks see weights as they are when all that is done: reduced ones, on those steps. A
        step that raises leaves the weights that the window began with.

        Collective on those steps: every rank of the process set; blocks.

        Raises:
            RuntimeError: torch's own GradScaler was used on several ranks; there is nothing to
                reduce; the optimizer keeps a second copy of the weights, the ranks have taken
                different steps, or their weights were changed differently (on every rank).
        """
        self._follow_parameters()
        self._drop_frozen_gradients()
        self._scaled = getattr(self, "found_inf", None) is not None
        skip = amp.must_skip(self, consistent=self._alone)
        try:
            if self._local_step == 0:
                self._begin_window()
            if skip:
                self._end_step()
                return None
            return self._hooked_step(*([] if closure is None else [closure]))
        except HorovodInternalError as error:
            if "Mismatched data types" in str(error):
                self._build_buckets()  # raises, and says how the ranks differ
            raise

    @torch.optim.Optimizer.profile_hook_step  # which calls the hooks
    def _hooked_step(self, closure: StepClosure = None) -> Any:
        step = super().step.__func__
        # torch wraps the user's step() with the hooks, too: they would come before the reduction.
        unhooked = step.__wrapped__ if getattr(step, "hooked", False) else step
        try:
            with self._evaluating():
                result = unhooked(self, *([] if closure is None else [closure]))
        except BaseException:
            self._restore()
            raise
        self._stepped_here = True
        self._end_step()
        return result

    def _end_step(self) -> None:
        self._local_step += 1
        if self._local_step >= self._options.local_steps:
            self._local_step = 0
            try:
                if self._stepped_here and not self._looked_for_copies:
                    self._looked_for_copies = True
                    self._check_weight_copies()
                self._next_round()
                for bucket in self._buckets:
                    bucket.start()
                self._apply()
            except Exception:
                self._abandon()
                self._restore()
                raise
        self._note_step()

    def _find_weight_copies(self) -> tuple[str, ...]:
        attributes = vars(self).keys() - self._wrapper_attributes
        return weight_copies.find(self, sorted(attributes))

    def _check_weight_copies(self) -> None:
        """Raise on every rank where, on any, the optimizer holds the weights twice. Collective."""
        if self._rounds is None:
            return
        places = self._find_weight_copies()
        if any(self._rounds.ask("weight_copies", bool(places)).values()):
            where = places[0] if places else "on another rank"
            raise RuntimeError(
                "delta variant: required an optimizer whose weights are the parameters alone, got "
                f"a {self._base.__name__} that keeps them a second time ({where}), where "
                "no reduction reaches them; use op=AdasumGrad, or adasum_hvd's AdamOffload for "
                "float32 master weights"
            )

    def _restore(self) -> None:
        """Set every parameter to the start."""
        for bucket in self._buckets:
            bucket.restore()

    # ---- resume inside a window of local steps ----

    def window(self) -> dict[str, Any] | None:
        """Return the steps and the start of an unfinished window of local steps.

        A rank alone has none: each of its steps is what all ranks have.
        """
        if self._waiting or not (self._local_step and self._buckets):
            return self._waiting
        starts = [bucket.start_weights.clone() for bucket in self._buckets]
        return {"local_step": self._local_step, "starts": starts}

    def load_window(self, window: dict[str, Any] | None) -> None:
        """Go on in a window of local steps; None begins a new one.

        Raises:
            ValueError: the window's starts are not those of these parameters.
        """
        self._local_step, self._waiting = 0, None
        if not window or not self._reducing:
            return
        if not self._buckets:  # the ranks have failed to meet, and will again
            self._waiting = window
            return
        places = [bucket.start_weights for bucket in self._buckets]
        wanted = [place.numel() for place in places]
        sizes = [saved.numel() for saved in window["starts"]]
        if sizes != wanted:
            raise ValueError(
                f"window of local steps: required starts of {wanted} elements, got {sizes}; "
                "load it with the parameters, bucket_bytes and groups that it was saved with, or "
                "save between windows"
            )
        self._local_step = window["local_step"]
        for place, saved in zip(places, window["starts"], strict=True):
            place.copy_(saved)

    def restart(self) -> None:
        """As the base's; a window of local steps goes on."""
        window, self._local_step = self.window(), 0
        super().restart()
        self.load_window(window)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus the start of an unfinished window of local steps."""
        state = super().state_dict()
        if window := self.window():
            state[_STATE_KEY] = window
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a state dict of a plain optimizer starts a new window."""
        state_dict = dict(state_dict)
        window = state_dict.pop(_STATE_KEY, None)
        super().load_state_dict(state_dict)
        self.load_window(window)


# torch wraps step() with its hooks once per class; the inner optimizer's is wrapped already.
DeltaOptimizer.step.hooked = True
