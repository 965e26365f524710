"""The gradient variant: gradients are reduced, then every rank takes the same step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adasum_hvd.base import ops
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.distributed.reduced import Reduced, noted, writes_to
from adasum_hvd.torch import amp
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.objects import allgather_object
from adasum_hvd.torch.optimizer.buckets import Bucket, NamedParameter, SparseBucket
from adasum_hvd.torch.optimizer.checks import ConsistencyCheck
from adasum_hvd.torch.optimizer.ready_counter import GradientReadyCounter
from adasum_hvd.torch.optimizer.reducer import Reducer


class GradientReducer(Reducer):
    """Reducer of gradients: starts during backward, and `step()` waits for the last bucket."""

    loss_scale: torch.Tensor | None = None  # a GradScaler's, during its reduction
    # A weak reference to our GradScaler that has unscaled last.
    scaler: Callable[[], Any] | None = None

    # One of the parameters, and its gradient of the last step; None after a warning.
    _last: tuple[torch.Tensor, Reduced] | None = None
    _warned = False

    def __init__(self, *arguments: Any):
        # Of no bucket yet.
        self._counter = GradientReadyCounter((), 1, str, self._start)
        super().__init__(*arguments)

    def _connect(self) -> None:
        self._sparse_names: set[str] = set()
        self._sparse_due = False  # a rank has found another sparse gradient
        self._sparse: list[SparseBucket] = []
        self._reset(synchronized=False)
        super()._connect()

    def _make_bucket(
        self, label: str, members: Sequence[NamedParameter], process_set: ProcessSet
    ) -> Bucket:
        dtype = self.parameters.wire_dtype(members[0][1])
        return Bucket(
            f"grad.{label}", members, dtype, self.options, process_set, with_flags=True
        )

    def _flat(self, named: Sequence[NamedParameter]) -> Sequence[NamedParameter]:
        """Return the parameters whose gradients have been dense so far."""
        rows = [(name, p) for name, p in named if name in self._sparse_names]
        label = f"sparse.{self.parameters.instance}"
        self._sparse = [SparseBucket(label, rows, self.options)] if rows else []
        return [(name, p) for name, p in named if name not in self._sparse_names]

    def rebuild(self) -> None:
        """As the base's."""
        self._check_unchanged(in_buckets=True)
        self._drain()
        self._counter.close()
        self._members = self._current_members()
        super().rebuild()
        self.buckets = [*self.flat_buckets, *self._sparse]
        passes, name_of = self.options.backward_passes_per_step, self.parameters.name_of
        self._counter = GradientReadyCounter(self.buckets, passes, name_of, self._start)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """See the wrapper's."""
        self._check_no_pass("set_backward_passes_per_step")
        super().set_backward_passes_per_step(passes)
        self._counter.expect(passes)

    def check_may_change(self) -> None:
        """Raise RuntimeError between passes: AdaSum of their sum needs all of them at once."""
        passes = self.options.backward_passes_per_step
        if passes > 1 and ops.is_adasum(self.options.op):
            self._check_no_pass("add_param_group")

    def _check_no_pass(self, function: str) -> None:
        if self._counter.touched:
            raise RuntimeError(
                f"{function}(): expected no backward pass since the last step() or zero_grad(), "
                "but got one, whose gradients may be reduced already; call step() or zero_grad() "
                "of this optimizer first"
            )

    @property
    def synchronized(self) -> bool:
        """Whether all gradients are reduced: backward has not run since."""
        return self._was_synchronized and not self._counter.touched

    def _reset(self, synchronized: bool) -> None:
        self._was_synchronized = synchronized
        # Gradients after synchronize().
        self._of_synchronize: list[torch.Tensor | None] = []
        self._counter.reset()

    # ---- one reduction of all buckets, on all ranks ----

    @torch.no_grad()
    def _start(self, bucket: Any) -> None:
        gradients = [parameter.grad for parameter in bucket.params]
        for parameter, gradient in zip(bucket.params, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                self._check_sparse(parameter)
        bucket.fill(gradients)
        # Whether the next step builds other buckets.
        changing = self.parameters.changes or self._members != self._current_members()
        if changing and bucket in self.flat_buckets:
            bucket.flags.announce_change()
        bucket.start()

    def _check_sparse(self, parameter: torch.Tensor) -> None:
        gathers = self.options.op in (ops.Average, ops.Sum)
        if not gathers and not self.options.sparse_as_dense:
            raise ValueError(
                f"gradient of {self.parameters.name_of(parameter)}: expected a dense gradient "
                f"with op={self.options.op.name}, but got a sparse one; pass sparse_as_dense=True, "
                "or make the layer with sparse=False"
            )

    def _run_round(self) -> None:
        """Start the buckets that backward has not started, and wait for all. Collective; blocks."""
        for bucket in self.buckets:
            if not bucket.in_flight:
                self._start(bucket)
        try:
            if self.consistency is not None:
                self._sparse_due |= self.consistency.next_round(
                    self._settings, lambda: bool(self._new_sparse_names())
                )
            for bucket in self.buckets:
                bucket.finish()
        except Exception:
            self._abandon()
            self._reset(synchronized=False)
            raise

    def _current_members(self) -> set[int]:
        return set(map(id, self.parameters.reduced()))

    def _announce_change(self, _: ConsistencyCheck) -> None:
        self._check_unchanged(in_buckets=True)
        self._run_round()
        self._drop_round()

    def _drain(self) -> None:
        """Finish the reductions that backward started, and drop them. Collective after backward.

        Ranks have started different buckets, so every rank starts its remaining ones. Every
        gradient that may be a bucket view gets its reduced value: another reduction keeps it.
        """
        if self._counter.touched:
            self._run_round()
            self._drop_round()
            self._follow_sparse()

    def _drop_round(self) -> None:
        for bucket in self.flat_buckets:
            bucket.write_back(only_views=True)
        self._reset(synchronized=False)

    def _reduce(self) -> None:
        self._follow_parameters()
        self._drop_frozen_gradients()
        self._check_unchanged()
        self._warn_of_sums()
        self._run_round()
        if any(b.flags.announces_change for b in self.common_buckets):
            self._drop_round()
            self.rebuild()  # raises an error that names the difference, if it is still there
            self._run_round()
        for bucket in self.buckets:
            bucket.write_back()
        if ops.is_adasum(self.options.op) and not (self.alone or self._warned):
            several = (p for bucket in self.flat_buckets for p in bucket.params)
            one = next((p for p in several if p.grad is not None), None)
            self._last = None if one is None else (one, noted(one.grad))
        self._reset(synchronized=True)
        self._follow_sparse()

    def _warn_of_sums(self) -> None:
        """Warn, once, if backward has added to gradients of the last step."""
        if self._last is None:
            return
        parameter, last = self._last
        passes = self._counter.passes_of(parameter)
        if passes and writes_to(parameter.grad, last) == passes:
            self._last, self._warned = None, True
            warnings.warn(
                "DistributedOptimizer: expected gradients of this step alone, but backward added "
                "to the reduced gradients of the last one, and AdaSum of such sums is wrong; call "
                "zero_grad() between steps (not grad.data.zero_(), which is not seen), and pass "
                "backward_passes_per_step to accumulate",
                stacklevel=8,
            )

    def _check_unchanged(self, in_buckets: bool = False) -> None:
        """Raise RuntimeError if a gradient (in a bucket) was changed after backward."""
        changed = self._counter.changed(in_buckets)
        if changed is not None:
            raise RuntimeError(
                f"gradient of {self.parameters.name_of(changed)}: expected as backward has left "
                "it, but got one changed between backward and step(), which would be lost, or be "
                "reduced in one bucket and not in another; call optimizer.synchronize(), change "
                "it, and step inside optimizer.skip_synchronize()"
            )

    def _new_sparse_names(self) -> list[str]:
        """Return the names of further parameters with sparse gradients."""
        if self.options.sparse_as_dense:
            return []
        return [
            self.parameters.name_of(parameter)
            for bucket in self.common_buckets
            for parameter in bucket.params
            if parameter.grad is not None and parameter.grad.is_sparse
        ]

    def _follow_sparse(self) -> None:
        """Move parameters with sparse gradients to their own bucket, on all ranks at once."""
        if self._sparse_due:
            self._sparse_due = False
            mine, process_set = self._new_sparse_names(), self.options.process_set
            for names in allgather_object(mine, "adasum.sparse", process_set):
                self._sparse_names.update(names)
            self.rebuild()

    def synchronize(self) -> None:
        """Wait until every `.grad` holds the reduced gradient, or None. Collective; blocks.

        Raises:
            RuntimeError: gradients were changed or replaced since backward; or the ranks have
                taken different steps, or have other hyperparameters (on every rank).
        """
        self._reduce()
        self._of_synchronize = [p.grad for b in self.buckets for p in b.params]

    def _settings(self, first: bool) -> dict[str, Any]:
        passes = self.options.backward_passes_per_step
        settings = {**self._shared_settings(), "backward_passes_per_step": passes}
        if first:
            settings["has state"] = self.parameters.any_has_state()
        if self.loss_scale is not None:
            settings["GradScaler's scale"] = self.loss_scale.item()
        return settings

    def _check_synchronized(self) -> None:
        """Raise if `step()` leaves out the reduction although gradients are not reduced."""
        if self.alone:
            return
        if self.skip_synchronize and not self.synchronized:
            amp.forget_scaler(self.optimizer)
            raise RuntimeError(
                "skip_synchronize(): expected synchronize() since the last backward pass, but got "
                "none; every rank would step with gradients of its own, so call "
                "optimizer.synchronize() first, or step() outside of skip_synchronize()"
            )
        scaled = getattr(self.optimizer, "found_inf", None) is not None
        if self.synchronized and not self.skip_synchronize and not scaled:
            parameters = (p for bucket in self.buckets for p in bucket.params)
            for p, gradient in zip(parameters, self._of_synchronize, strict=False):
                if p.grad is not gradient:
                    raise RuntimeError(
                        f"gradient of {self.parameters.name_of(p)}: expected the one of "
                        "synchronize(), but got another one, which has not been reduced; call "
                        "synchronize() again, or step inside skip_synchronize() if it is the same "
                        "on all ranks"
                    )

    def step(self, *closure: Any) -> Any:
        """Take the optimizer's step with the reduced gradients. Collective; blocks.

        A closure's gradients are reduced, and its loss is averaged. Returns the first local loss.

        Raises:
            RuntimeError: the step would use gradients that are not reduced (inside
                `skip_synchronize()`, or with torch's own GradScaler), or would lose a change of a
                gradient. There is nothing to reduce. Steps or hyperparameters differ between
                ranks (on every rank).
        """
        self._drop_frozen_gradients()
        result = self._step_with(*closure) if closure else self._plain_step()
        self._reset(synchronized=False)
        self._note_step()
        return result

    def _plain_step(self) -> Any:
        self._check_synchronized()
        partial = self.parameters.any_partial
        consistent = self.alone or (self.synchronized and not partial)
        if amp.must_skip(self.optimizer, consistent):
            self._drain()
            return None
        if not self.synchronized:
            self._reduce()
        return self.optimizer._base.step(self.optimizer)

    def _step_with(self, closure: Any) -> Any:
        losses: list[Any] = []

        def reduced_closure() -> Any:
            with torch.enable_grad():
                losses.append(closure())
            self._reduce()
            return self._mean_loss(losses[-1])

        self.optimizer._base.step(self.optimizer, reduced_closure)
        return losses[0] if losses else None

    def _mean_loss(self, loss: Any) -> Any:
        """Return the ranks' average loss, so that a line search is the same on all."""
        if self.alone or loss is None:
            return loss
        local = torch.as_tensor(loss, dtype=torch.float64).detach().cpu().reshape(1)
        mean = torch_ops.allreduce(
            local,
            name=f"adasum.loss.{self.parameters.instance}",
            op=ops.Average,
            process_set=self.options.process_set,
        )
        return mean.reshape(())

    def before_zero_grad(self) -> None:
        """Wait for gradients that are being reduced, and drop them."""
        self._drain()
        self._reset(synchronized=False)
