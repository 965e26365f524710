"""The gradient variant: gradients are reduced, then every rank takes the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from adasum_hvd import ops
from adasum_hvd.torch import amp
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.buckets import Bucket, NamedParameter
from adasum_hvd.torch.countdown import GradientCountdown
from adasum_hvd.torch.distributed import DistributedBase, Options, StepClosure


def _seen(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """Return what changes when a gradient is replaced or written to."""
    return None if gradient is None else (id(gradient), gradient._version)


class GradientOptimizer(DistributedBase):
    """Reduces gradients while backward runs; `step()` waits for the last of them."""

    _variant = "gradient"

    def _configure(self, names: dict[int, str], options: Options) -> None:
        self._countdown: GradientCountdown | None = None
        self._was_synchronized = False
        self._skip_synchronize = False
        super()._configure(names, options)

    def _make_bucket(
        self, label: str, members: Sequence[NamedParameter], process_set: Any
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

    def _build_buckets(self) -> None:
        self._drain()
        if self._countdown:
            self._countdown.close()
        super()._build_buckets()
        self._countdown = GradientCountdown(
            [bucket.params for bucket in self._buckets],
            self._options.backward_passes_per_step,
            self._name_of,
            self._on_complete,
        )

    @property
    def _synchronized(self) -> bool:
        """Whether the gradients are the reduced ones: none has come since."""
        return self._was_synchronized and not self._touched

    @property
    def _touched(self) -> bool:
        return self._countdown is not None and self._countdown.touched

    def _reset(self, synchronized: bool) -> None:
        self._was_synchronized = synchronized
        if self._countdown:
            self._countdown.reset()

    def _drain(self) -> None:
        """Finish what backward started. Collective after a backward pass.

        Where ranks used different parameters, a bucket may be under way on one rank and not
        on another: all ranks start what they have not, or the first would wait for ever.
        """
        if not self._touched:
            return
        for bucket in self._buckets:
            if not bucket.in_flight:
                self._start(bucket)
        for bucket in self._buckets:
            bucket.finish()

    def _on_complete(self, index: int) -> None:
        self._start(self._buckets[index])

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        bucket.fill([self._dense(parameter) for parameter in bucket.params])
        bucket.filled_from = [_seen(parameter.grad) for parameter in bucket.params]
        bucket.start()

    def _dense(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            return gradient
        if not self._options.sparse_as_dense:
            raise ValueError(
                f"gradient of {self._names[id(parameter)]}: required a dense gradient, got "
                "a sparse one; pass sparse_as_dense=True, or make the layer with "
                "sparse=False"
            )
        return gradient.to_dense()

    def synchronize(self) -> None:
        """Wait until every `.grad` holds the reduced gradient.

        A gradient that is None here becomes the others' reduced gradient if any rank has
        one, and stays None if none has, so that no rank alone moves an unused parameter.

        Collective: every rank of the process set; blocks.
        """
        self._follow_parameters()
        for bucket in self._buckets:
            if not bucket.in_flight:
                self._start(bucket)
        for bucket in self._buckets:
            bucket.finish()
            self._write_back(bucket)
        self._reset(synchronized=True)

    def _write_back(self, bucket: Bucket) -> None:
        self._check_unchanged(bucket)
        gradients, views = [], []
        for index, parameter in enumerate(bucket.params):
            gradient, view = parameter.grad, bucket.views[index]
            if gradient is None:
                if bucket.flags[index] != 0:
                    parameter.grad = view.to(parameter.dtype, copy=True)
            elif gradient.is_sparse:
                dense = view.to(gradient.dtype)
                parameter.grad = dense.to_sparse(gradient.sparse_dim())
            else:
                gradients.append(gradient)
                views.append(view)
        if gradients:
            torch._foreach_copy_(gradients, views)

    def _check_unchanged(self, bucket: Bucket) -> None:
        """Raise where a gradient is another one than the one that was reduced."""
        for parameter, seen in zip(bucket.params, bucket.filled_from, strict=True):
            if seen is not None and seen != _seen(parameter.grad):
                raise RuntimeError(
                    f"gradient of {self._name_of(parameter)}: required as backward has left it, "
                    "got one changed between backward and step(), which would be lost, for it "
                    "has been reduced already; call optimizer.synchronize(), change it, and "
                    "step inside optimizer.skip_synchronize()"
                )

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

    @torch.no_grad()
    def step(self, closure: StepClosure = None) -> Any:
        """Take the optimizer's step with the reduced gradients. Collective; blocks.

        After each evaluation of a closure its gradients are reduced and its loss averaged, so
        that L-BFGS comes to the same decisions on all ranks. Returns the first local loss.

        Raises:
            RuntimeError: torch's own GradScaler saw gradients that were not reduced yet, or
                there is nothing to reduce.
        """
        self._drop_frozen_gradients()
        if closure is not None:
            losses: list[Any] = []

            def reduced_closure() -> Any:
                with torch.enable_grad():
                    losses.append(closure())
                self.synchronize()
                return self._mean_loss(losses[-1])

            super().step(reduced_closure)
            result = losses[0] if losses else None
        else:
            reduced = self._synchronized or self._skip_synchronize
            consistent = self._alone or (reduced and not self._any_partial)
            if amp.must_skip(self, consistent):
                result = None
            else:
                if not reduced:
                    self.synchronize()
                result = super().step()
        self._was_synchronized = False
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Gradients that are being reduced are waited for and dropped.

        Collective where a backward pass has not been followed by `step()`.
        """
        self._drain()
        self._reset(synchronized=False)
        super().zero_grad(set_to_none)


# torch wraps step() with its hooks once per class; the inner optimizer's is wrapped already.
GradientOptimizer.step.hooked = True
