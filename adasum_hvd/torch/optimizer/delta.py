"""The delta variant: local steps, then `w = w_old + AdaSum(w_new - w_old)`."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from adasum_hvd.base import ops
from adasum_hvd.base.agreement import first_difference
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.distributed.duplicate_weights import Search
from adasum_hvd.torch import amp, wire
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.optimizer import checks
from adasum_hvd.torch.optimizer.buckets import (
    ChangeBucket,
    NamedParameter,
    weight_change,
)
from adasum_hvd.torch.optimizer.reducer import Reducer

# Hyperparameters that may differ between ranks: learning rates, and the implementation.
_OF_A_RANK = re.compile(r"(\b|_)lr$|\b(foreach|fused|capturable|differentiable)$")


class DeltaReducer(Reducer):
    """Reducer of weight changes after a local step. Parameters hold weights at all times."""

    buckets: list[ChangeBucket]
    _local_step = 0  # steps taken since the replicas were last equal
    _waiting: dict[str, Any] | None = None  # a loaded window, until there are buckets
    _epoch: int | None
    _recorded_in: int | None

    def _connect(self) -> None:
        self._scaled = False  # a gradient scaler called this step()
        self._replaced = False  # weights were changed since all ranks agreed
        # `consistency.epoch` when all ranks agreed on a start, and of `_settings_before`.
        self._epoch = self._recorded_in = None
        self._stepped_here = self._looked_for_copies = False
        self._copies = Search(without=("_adasum", "_wrapped"))
        self.change_overflowed = False
        super()._connect()

    def _make_bucket(
        self, label: str, members: Sequence[NamedParameter], process_set: ProcessSet
    ) -> ChangeBucket:
        self.members.append([parameter for _, parameter in members])
        named = [(name, self.weights_of(parameter)) for name, parameter in members]
        weights = [weight for _, weight in named]
        dtype = self.parameters.wire_dtype(weights[0])
        in_op = weight_change.op_takes(weights, dtype, self.options)
        kind = weight_change.ChangeInOpBucket if in_op else ChangeBucket
        return kind(f"weights.{label}", named, dtype, self.options, process_set)

    def check_may_change(self) -> None:
        """Raise RuntimeError inside a window of local steps."""
        if self._local_step and self.reducing:
            raise RuntimeError(
                "DistributedOptimizer: expected parameters to change between reductions, but got "
                f"a change {self._local_step} local steps into a window"
                "; call step() until the window is complete first"
            )

    def _announce_change(self, check: checks.ConsistencyCheck) -> None:
        """Send the other ranks' next messages with another dtype, which Horovod reports to all."""
        self.check_may_change()
        if self._epoch != checks.epoch():
            names = [check.message_name("start")]
        elif not self._looked_for_copies:
            names = [check.message_name("weight_copies")]
        elif check.is_due:
            names = [check.message_name("next")]
        else:
            entries = (bucket.entry for bucket in self.common_buckets)
            names = [entry.removeprefix("allreduce.") for entry in entries]
        none = torch.zeros(1, dtype=torch.int64)
        options = {"op": ops.Sum, "process_set": self.options.process_set}
        send = functools.partial(torch_ops.allreduce_async, none, **options)
        for handle in [send(name=name) for name in names]:
            # The comparison in rebuild() names the difference.
            with suppress(HorovodInternalError):
                wire.synchronize(handle)

    def rebuild(self) -> None:
        """As the base's."""
        self.check_may_change()
        self.members: list[list[torch.Tensor]] = []  # parameters by bucket
        super().rebuild()

    # ---- the step ----

    @torch.no_grad()
    def _begin_window(self) -> None:
        """Record the start of the window."""
        # Since the job's start or the last join().
        first = self._epoch != checks.epoch()
        for bucket in self.buckets:
            self._replaced |= bucket.begin_window()
        if first and self.consistency is not None:
            self._agree_on_start(self.consistency)
            self._stepped_here = self._looked_for_copies = self._replaced = False
        self._epoch = checks.epoch()
        if self.consistency is not None:
            weights = (weight for bucket in self.buckets for weight in bucket.params)
            self._copies.begin(self.optimizer, weights)

    def _agree_on_start(self, check: checks.ConsistencyCheck) -> None:
        """Raise RuntimeError on every rank unless all start from the same bits. Collective."""
        checksums = check.ask("start", checks.checksum_of(self._common_starts()))
        root = min(checksums)
        others = [rank for rank, of in checksums.items() if of != checksums[root]]
        if others:
            raise RuntimeError(
                "DistributedOptimizer: expected the same weights on all ranks before the first "
                f"step, but got others on ranks {others} than on rank {root} (seen by rank "
                f"{mpi_ops.rank()}); call broadcast_parameters(model.state_dict(), root_rank="
                f"{root}), or mark_worker_local() what is a rank's own"
            )

    def _common_starts(self) -> list[torch.Tensor]:
        return [bucket.start_weights for bucket in self.common_buckets]

    def _settings(self, first: bool) -> dict[str, Any]:
        """Return the settings that must be equal in the first step; schedules may differ later."""
        before = self._settings_before if first else {}
        return {n: v for n, v in before.items() if not _OF_A_RANK.search(n)}

    def _record_settings(self) -> None:
        """Keep the settings from before the first step, which changes an optimizer's state."""
        if self._recorded_in != checks.epoch():
            self._recorded_in = checks.epoch()
            self._settings_before = self._shared_settings()
            self._had_state = bool(self.optimizer.state)

    def _state_names(self) -> set[str]:
        """Return the names of settings that steps or a checkpoint have changed: Prodigy's `d`."""
        before, after = self._settings_before, self._shared_settings()
        names = {n for n, value in before.items() if after.get(n) != value}
        if self._had_state:
            defaults = checks.hyperparameters([getattr(self.optimizer, "defaults", {})])
            defaults["optimizer"] = before["optimizer"]
            names |= {
                n for n, v in before.items() if defaults.get(n.rpartition(".")[2]) != v
            }
        return names

    def _next_round(self, check: checks.ConsistencyCheck) -> None:
        """Compare the ranks, and their starts if weights were changed between steps. Collective."""
        if not check.next_round(
            self._settings, lambda: self._replaced, self._state_names
        ):
            return
        self._replaced = False
        checksums = check.ask("changed", checks.checksum_of(self._common_starts()))
        if len(set(checksums.values())) > 1:
            raise RuntimeError(
                "DistributedOptimizer: expected the same weights on all ranks at the start "
                f"of a step, but got another {self._first_different(check)} after a change "
                f"between steps (seen by rank {mpi_ops.rank()}); change them alike on all "
                "ranks, bit for bit, or broadcast_parameters() afterwards; if they were moved for "
                "a moment, put back a copy"
            )

    def _first_different(self, check: checks.ConsistencyCheck) -> str:
        """Return the name of the first weight whose start differs between ranks. Collective."""
        buckets = self.common_buckets
        starts = [start for bucket in buckets for start, _ in bucket.changes()]
        sums = check.gather("each", [checks.checksum_of([start]) for start in starts])
        different = first_difference(list(sums.values()))
        names = [name for bucket in buckets for name in bucket.names]
        return names[different[0]] if different else "weight"

    def _apply(self) -> None:
        """Wait for the reduced changes, and set every parameter to start + change."""
        for bucket in self.buckets:
            bucket.finish()
        if self._scaled and self.reducing and not self._changes_are_finite():
            self._restore()
            self.change_overflowed = True
            return
        limit = self.options.clip_delta_norm
        if limit is not None and self.buckets:
            norm_of = torch.linalg.vector_norm
            norms = [norm_of(b.flat.float()).cpu() for b in self.buckets]
            norm = norm_of(torch.stack(norms)).item()
            for bucket in self.buckets if norm > limit else ():
                bucket.flat.mul_(limit / norm)
        for bucket in self.buckets:
            bucket.apply()

    def _changes_are_finite(self) -> bool:
        """Return whether all reduced changes are finite, the same on all ranks."""
        largest = [bucket.largest().double().cpu() for bucket in self.buckets]
        finite = torch.isfinite(torch.stack(largest)).all()
        if self.parameters.any_partial:  # ranks have reduced different parameters
            finite = torch_ops.allreduce(
                finite.double().reshape(1),
                name=f"adasum.change_is_finite.{self.parameters.instance}",
                op=ops.Min,
                process_set=self.options.process_set,
            )
        return bool(finite)

    def step(self, *closure: Any) -> Any:
        """Take the local step, and on every `local_steps`-th reduce and apply the change.

        A step that raises restores the weights of the window's start. Collective when it reduces.

        Raises:
            RuntimeError: torch's own GradScaler was used on several ranks; there is nothing to
                reduce; the optimizer keeps a second copy of the weights, the ranks have taken
                different steps, or their weights were changed differently (on every rank).
            ValueError: the ranks' parameters differ; on every rank.
        """
        self._follow_parameters()
        self._drop_frozen_gradients()
        self._record_settings()
        self._scaled = getattr(self.optimizer, "found_inf", None) is not None
        skip = amp.must_skip(self.optimizer, consistent=self.alone)
        try:
            if self._local_step == 0:
                self._begin_window()
            else:
                self._search()
            if skip:
                self._end_step()
                return None
            # Between the optimizer's pre and post hooks, which torch's decorator runs.
            hooked = torch.optim.Optimizer.profile_hook_step(self._step_and_reduce)
            return hooked(self.optimizer, *closure)
        except HorovodInternalError as error:
            if "Mismatched data types" in str(error):
                self.rebuild()  # raises an error that names the difference
            raise

    def _step_and_reduce(self, optimizer: Any, *closure: Any) -> Any:
        step = optimizer._base.step
        unhooked = step.__wrapped__ if getattr(step, "hooked", False) else step
        try:
            result = unhooked(optimizer, *closure)
        except BaseException:
            self._restore()
            raise
        self._stepped_here = True
        self._end_step()
        return result

    @torch.no_grad()
    def _end_step(self) -> None:
        self._local_step += 1
        if self._local_step >= self.options.local_steps:
            self._local_step = 0
            try:
                if self.consistency is not None:
                    self._check_duplicates(self.consistency)
                    self._next_round(self.consistency)
                for bucket in self.buckets:
                    bucket.start()
                self._apply()
            except Exception:
                self._abandon()
                self._restore()
                raise
        self._note_step()

    def _search(self) -> None:
        changes = (bucket.changes() for bucket in self.buckets)
        self._copies.end(self.optimizer, chain.from_iterable(changes))

    def _check_duplicates(self, check: checks.ConsistencyCheck) -> None:
        """Raise on every rank if an optimizer keeps a copy of the weights. Collective at first."""
        if not self._stepped_here or self._looked_for_copies:
            return
        self._search()
        places = self._copies.places
        answer = 0 if places is None else 1 + len(places)
        largest = max(check.ask("weight_copies", answer).values())
        self._looked_for_copies = largest > 0
        if largest > 1:
            where = places[0] if places else "on another rank"
            raise RuntimeError(
                "delta variant: expected an optimizer whose weights are the parameters alone, but "
                f"got a {self.optimizer._base.__name__} that keeps them a second time ({where}), "
                "where no reduction reaches them; use op=AdasumGrad, or adasum_hvd's AdamOffload "
                "for float32 master weights"
            )

    @torch.no_grad()
    def _restore(self) -> None:
        """Set every parameter to the start."""
        for bucket in self.buckets:
            bucket.restore()

    # ---- resume inside a window of local steps ----

    def window(self) -> dict[str, Any] | None:
        """Return the steps and the start of an unfinished window; a single rank has none."""
        if self._waiting or not (self._local_step and self.buckets):
            return self._waiting
        starts = [bucket.start_weights.clone() for bucket in self.buckets]
        return {"local_step": self._local_step, "starts": starts}

    def load_window(self, window: dict[str, Any] | None) -> None:
        """Continue a window of local steps; None begins a new one."""
        self._local_step, self._waiting = 0, None
        if not window or not self.reducing:
            return
        if not self.buckets:  # not built: the ranks could not be reached
            self._waiting = window
            return
        places = [bucket.start_weights for bucket in self.buckets]
        expected = [place.numel() for place in places]
        sizes = [saved.numel() for saved in window["starts"]]
        if sizes != expected:
            raise ValueError(
                f"window of local steps: expected starts of {expected} elements, but got {sizes}; "
                "load it with the parameters, bucket_bytes and groups that it was saved with, or "
                "save between windows"
            )
        self._local_step = window["local_step"]
        for place, saved in zip(places, window["starts"], strict=True):
            place.copy_(saved)

    def restart(self) -> None:
        """Restart with the job's current ranks; a window of local steps continues."""
        window, self._local_step = self.window(), 0
        super().restart()
        self.load_window(window)
