"""The gradient variant: gradients are reduced, then every rank takes the same step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from adasum_hvd.common import ops
from adasum_hvd.common.options import Options, ProcessSet
from adasum_hvd.torch import amp
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.objects import allgather_object
from adasum_hvd.torch.optimizer.base import DistributedBase, StepClosure
from adasum_hvd.torch.optimizer.buckets import Bucket, NamedParameter
from adasum_hvd.torch.optimizer.countdown import GradientCountdown
from adasum_hvd.torch.optimizer.rounds import Rounds
from adasum_hvd.torch.optimizer.sparse_bucket import SparseBucket


class GradientOptimizer(DistributedBase):
    """Reduces gradients while backward runs; `step()` waits for the last of them."""

    _reduces_gradients = True

    def _configure(
        self, plain: torch.optim.Optimizer, names: dict[int, str], options: Options
    ) -> None:
        self._countdown: GradientCountdown | None = None
        self._skip_synchronize = False
        self._sparse: list[SparseBucket] = []
        # That of a GradScaler, while it reduces.
        self._loss_scale: torch.Tensor | None = None
        super()._configure(plain, names, options)

    def _connect(self) -> None:
        self._sparse_names: set[str] = set()
        self._sparse_due = False  # some rank has found one more
        self._reset(synchronized=False)
        super()._connect()

    def _make_bucket(
        self, label: str, members: Sequence[NamedParameter], process_set: ProcessSet
    ) -> Bucket:
        return Bucket(
            f"grad.{label}",
            members,
            self._wire_dtype(members[0][1]),
            self._options.op,
            self._options.factors,
            process_set,
            with_flags=True,
        )

    def _bucketed(self, named: Sequence[NamedParameter]) -> Sequence[NamedParameter]:
        """Return those whose gradients are dense, as far as is known."""
        rows = [(name, p) for name, p in named if name in self._sparse_names]
        self._sparse = []
        if rows:
            label = f"sparse.{self._instance}"
            op, process_set = self._options.op, self._options.process_set
            self._sparse = [SparseBucket(label, rows, op, process_set)]
        return [(name, p) for name, p in named if name not in self._sparse_names]

    def _build_buckets(self) -> None:
        self._check_unchanged(in_buckets=True)
        self._drain()
        if self._countdown:
            self._countdown.close()
        self._members = self._current_members()
        super()._build_buckets()
        self._carriers = [*self._buckets, *self._sparse]
        self._count()

    def _count(self) -> None:
        self._countdown = GradientCountdown(
            self._carriers,
            self._options.backward_passes_per_step,
            self._name_of,
            self._on_complete,
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As the base's.

        Raises:
            RuntimeError: a backward pass has not been followed by `step()` or `zero_grad()`: what
                it has made may be reduced already, and more passes could not add to it.
        """
        if self._touched:
            raise RuntimeError(
                "set_backward_passes_per_step(): required no backward pass since the last step() "
                "or zero_grad(), got one, whose gradients may be reduced already; call step() or "
                "zero_grad() of this optimizer first"
            )
        super().set_backward_passes_per_step(passes)
        if self._countdown:
            self._countdown.close()
        self._count()

    @property
    def _synchronized(self) -> bool:
        """Whether the gradients are the reduced ones: none has come since."""
        return self._was_synchronized and not self._touched

    @property
    def _touched(self) -> bool:
        return self._countdown is not None and self._countdown.touched

    def _reset(self, synchronized: bool) -> None:
        self._was_synchronized = synchronized
        self._handed_out: list[torch.Tensor | None] = []  # gradients of synchronize()
        if self._countdown:
            self._countdown.reset()

    def restart(self) -> None:
        """As the base's. Gradients are dropped where a part of them may be half reduced."""
        if any(self._is_under_way(bucket) for bucket in self._buckets):
            torch.optim.Optimizer.zero_grad(self)
        super().restart()

    @staticmethod
    def _is_under_way(bucket: Bucket) -> bool:
        return bucket.in_flight or any(
            parameter.grad is not None and bucket.holds(index, parameter.grad)
            for index, parameter in enumerate(bucket.params)
        )

    # ---- a round: all buckets, on all ranks ----

    def _on_complete(self, index: int) -> None:
        self._start(self._carriers[index])

    @torch.no_grad()
    def _start(self, carrier: Any) -> None:
        gradients = [parameter.grad for parameter in carrier.params]
        for parameter, gradient in zip(carrier.params, gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                self._check_sparse(parameter)
        carrier.fill(gradients)
        if carrier in self._buckets and self._is_changing():
            carrier.announce_change()
        carrier.start()

    def _check_sparse(self, parameter: torch.Tensor) -> None:
        gathers = self._options.op in (ops.Average, ops.Sum)
        if not gathers and not self._options.sparse_as_dense:
            raise ValueError(
                f"gradient of {self._name_of(parameter)}: required a dense gradient with op="
                f"{self._options.op.name}, got a sparse one; pass sparse_as_dense=True, or "
                "make the layer with sparse=False"
            )

    def _run_round(self) -> None:
        """Start what backward has not started, and wait for all of it. Collective; blocks."""
        for carrier in self._carriers:
            if not carrier.in_flight:
                self._start(carrier)
        try:
            self._next_round()
            for carrier in self._carriers:
                carrier.finish()
        except Exception:
            self._abandon()
            self._reset(synchronized=False)
            raise

    def _is_changing(self) -> bool:
        """Return whether the next step makes other buckets, as far as backward can tell."""
        return self._changes or self._members != self._current_members()

    def _current_members(self) -> list[tuple[int, bool]]:
        groups = self.param_groups
        return [(id(p), p.requires_grad) for group in groups for p in group["params"]]

    def _announce_change(self, rounds: Rounds) -> None:
        self._check_unchanged(in_buckets=True)
        self._run_round()
        self._drop_round()

    def _drain(self) -> None:
        """Finish what backward started, and drop it. Collective after a backward pass.

        Where ranks used different parameters, a bucket may be under way on one rank and not
        on another: all ranks start what they have not, or the first would wait for ever.
        Gradients that were moved into their buckets are the reduced ones then. So those that
        could have been become these, too, on all ranks: reduced once more, they stay as they are.
        Zeros in place of no gradient are neutral.
        """
        if self._touched:
            self._run_round()
            self._drop_round()
            self._follow_sparse()

    def _drop_round(self) -> None:
        for bucket in self._buckets:
            places = [
                place
                for place, parameter in enumerate(bucket.params)
                if parameter.grad is not None and bucket.may_hold_gradient(place)
            ]
            self._write_back(bucket, places)
        self._reset(synchronized=False)

    def _reduce(self) -> None:
        self._follow_parameters()
        self._drop_frozen_gradients()
        self._check_unchanged()
        self._run_round()
        if any(bucket.announces_change for bucket in self._common_buckets):
            self._drop_round()
            self._build_buckets()  # raises, and says how the ranks differ
        for bucket in self._buckets:
            self._write_back(bucket, range(len(bucket.params)))
        for rows in self._sparse:
            rows.write_back()
        self._reset(synchronized=True)
        self._follow_sparse()

    def _check_unchanged(self, in_buckets: bool = False) -> None:
        """Raise where a gradient (of those in buckets) is not as backward has left it."""
        changed = self._countdown.changed(in_buckets) if self._countdown else None
        if changed is not None:
            raise RuntimeError(
                f"gradient of {self._name_of(changed)}: required as backward has left it, got "
                "one changed between backward and step(), which would be lost, or be reduced "
                "in one bucket and not in another; call optimizer.synchronize(), change it, "
                "and step inside optimizer.skip_synchronize()"
            )

    def _has_news(self) -> bool:
        return bool(self._new_sparse_names())

    def _hear_news(self) -> None:
        self._sparse_due = True

    def _new_sparse_names(self) -> list[str]:
        """Return the parameters that have turned out to have sparse gradients."""
        if self._options.sparse_as_dense:
            return []
        return [
            self._name_of(parameter)
            for bucket in self._common_buckets
            for parameter in bucket.params
            if parameter.grad is not None and parameter.grad.is_sparse
        ]

    def _follow_sparse(self) -> None:
        """Give them a bucket of their own, on all ranks at once."""
        if self._sparse_due:
            self._sparse_due = False
            mine, process_set = self._new_sparse_names(), self._options.process_set
            for names in allgather_object(mine, "adasum.sparse", process_set):
                self._sparse_names.update(names)
            self._build_buckets()

    def synchronize(self) -> None:
        """Wait until every `.grad` holds the reduced gradient.

        A gradient that is None here becomes the others' reduced gradient if any rank has
        one, and stays None if none has, so that no rank alone moves an unused parameter.

        Collective: every rank of the process set; blocks.

        Raises:
            RuntimeError: gradients were changed or replaced since backward; or the ranks have
                taken different steps, or have other hyperparameters (on every rank).
        """
        self._reduce()
        self._handed_out = [p.grad for c in self._carriers for p in c.params]

    def _write_back(self, bucket: Bucket, places: Iterable[int]) -> None:
        """Set gradients to what was reduced: to the bucket's own memory, without a copy."""
        gradients, views = [], []
        for index in places:
            parameter, view = bucket.params[index], bucket.views[index]
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                dense = view.to(gradient.dtype)
                parameter.grad = dense.to_sparse(gradient.sparse_dim())
            elif gradient is None and bucket.flags[index] == 0:
                continue  # no rank has one
            elif bucket.may_hold_gradient(index):
                if gradient is None or not bucket.holds(index, gradient):
                    bucket.hand_out(index)
            elif gradient is None:
                parameter.grad = view.to(parameter.dtype, copy=True)
            else:
                gradients.append(gradient)
                views.append(view)
        if gradients:
            torch._foreach_copy_(gradients, views)

    def _settings(self, first: bool) -> dict[str, Any]:
        passes = self._options.backward_passes_per_step
        settings = {**super()._settings(first), "backward_passes_per_step": passes}
        if self._loss_scale is not None:
            settings["GradScaler's scale"] = self._loss_scale.item()
        return settings

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step()` use the gradients as they are, after an own `synchronize()`.

        Example:
            >>> opt.synchronize()                                      # doctest: +SKIP
            >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1)  # doctest: +SKIP
            >>> with opt.skip_synchronize():                           # doctest: +SKIP
            ...     opt.step()
        """
        self._skip_synchronize = True
        try:
            yield
        finally:
            self._skip_synchronize = False

    def _check_synchronized(self) -> None:
        """Raise where `step()` was told, or has reason, to leave out the reduction, wrongly."""
        if self._alone:
            return
        if self._skip_synchronize and not self._synchronized:
            amp.forget_scaler(self)
            raise RuntimeError(
                "skip_synchronize(): required synchronize() since the last backward pass, got "
                "none; every rank would step with gradients of its own, so call "
                "optimizer.synchronize() first, or step() outside of skip_synchronize()"
            )
        scaled = getattr(self, "found_inf", None) is not None
        if self._synchronized and not self._skip_synchronize and not scaled:
            parameters = (p for c in self._carriers for p in c.params)
            for p, gradient in zip(parameters, self._handed_out, strict=False):
                if p.grad is not gradient:
                    raise RuntimeError(
                        f"gradient of {self._name_of(p)}: required the one of synchronize(), got "
                        "another one, which has not been reduced; call synchronize() again, or "
                        "step inside skip_synchronize() if it is the same on all ranks"
                    )

    @torch.no_grad()
    def step(self, closure: StepClosure = None) -> Any:
        """Take the optimizer's step with the reduced gradients. Collective; blocks.

        After each evaluation of a closure its gradients are reduced and its loss averaged, so
        that L-BFGS comes to the same decisions on all ranks. Returns the first local loss.

        Raises:
            RuntimeError: gradients that were not reduced would be stepped with (inside
                `skip_synchronize()`, or by torch's own GradScaler), or changed ones lost; or
                there is nothing to reduce; or the ranks have taken different steps, or have
                other hyperparameters (on every rank).
        """
        self._drop_frozen_gradients()
        if closure is not None:
            losses: list[Any] = []

            def reduced_closure() -> Any:
                with torch.enable_grad():
                    losses.append(closure())
                self._reduce()
                return self._mean_loss(losses[-1])

            with self._evaluating():
                super().step(reduced_closure)
            result = losses[0] if losses else None
        else:
            self._check_synchronized()
            consistent = self._alone or (self._synchronized and not self._any_partial)
            if amp.must_skip(self, consistent):
                self._drain()
                result = None
            else:
                if not self._synchronized:
                    self._reduce()
                result = super().step()
        self._reset(synchronized=False)
        self._note_step()
        return result

    def _mean_loss(self, loss: Any) -> Any:
        """Return the loss that all ranks see: a line search must not part them."""
        if self._alone or loss is None:
            return loss
        local = torch.as_tensor(loss, dtype=torch.float64).detach().cpu().reshape(1)
        return torch_ops.allreduce(
            local,
            name=f"adasum.loss.{self._instance}",
            op=ops.Average,
            process_set=self._options.process_set,
        ).reshape(())

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the base's. Gradients that are being reduced are waited for and dropped.

        Collective where a backward pass has not been followed by `step()`.
        """
        self._drain()
        self._reset(synchronized=False)
        super().zero_grad(*args, **kwargs)


# torch wraps step() with its hooks once per class; the inner optimizer's is wrapped already.
GradientOptimizer.step.hooked = True
