"""AdaSum across replicas of a sharded model: FSDP2, tensor parallelism, both, or neither.

AdaSum is not linear, so it must see each gradient once a step, complete. A module that runs twice
in a pass fires its hooks twice: earlier passes of the same kind show how often to expect them, and
the first pass reduces at its end.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from adasum_hvd.base.frames import is_inside
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.forward_check import ForwardCheck
from adasum_hvd.distributed.lanes import Future, lane_on, wait_quietly
from adasum_hvd.distributed.reduced import Reduced, reduced_of, writes_to
from adasum_hvd.distributed.replica_mesh import connect
from adasum_hvd.distributed.replicas import Copies
from adasum_hvd.distributed.rules import Coefficients, Rule, Ruled, rule_of
from adasum_hvd.distributed.sharding import complete, is_fsdp_module, like, local_of
from adasum_hvd.distributed.units import (
    MISSING,
    NEW,
    REDUCED,
    Progress,
    Selection,
    Unit,
    call_weakly,
    gradient_dtype,
    reduce_unit,
    units_of,
)

# The attribute by which parameters keep their handle alive. Their hooks must not, because the
# garbage collector cannot see autograd's references. The handle has no weak references to
# parameters, because `model.float()` fails on a DTensor that has any.
_KEPT = "_adasum_replicas"


class ReplicateHandle(Ruled):
    """The hooks of :func:`adasum_replicate` on a model's parameters."""

    def __init__(
        self,
        model: torch.nn.Module,
        replicas: tuple[Communicator, Rule, Copies],
        overlap: bool,
    ):
        communicator, self.rule, self._copies = replicas
        self._communicator = communicator
        self._fsdp = weakref.WeakSet(filter(is_fsdp_module, model.modules()))
        self._overlap, self._local = overlap, False
        self._accumulated = False  # passes in `no_sync()` since the last reduction
        units = units_of(model)
        self._selection = Selection("adasum_replicate", model)
        self._units = [Progress(unit) for unit in units]
        devices = dict.fromkeys(unit.locals()[0].device for unit in units)
        self._lanes = {device: lane_on(device, communicator) for device in devices}
        self._next = 0  # the unit that is launched next: all ranks launch in one order
        self._launched = 0  # passes that have launched a unit
        self._widest = max((len(unit.parameters) for unit in units), default=0)
        self._futures: list[tuple[Unit, Future]] = []
        self._pass: int | None = None  # autograd's number of this backward pass
        self._reduced: dict[int, Reduced] = {}  # by parameter
        hook = weakref.WeakMethod(self._hook)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(
                partial(call_weakly, hook, n, k)
            )
            for n, unit in enumerate(units)
            for k, parameter in enumerate(unit.parameters)
        ]
        self._numbers = {handle.id for handle in self._handles}  # of hooks
        self._handles += self._selection.hooks()
        self._parameters = list(model.parameters())
        for parameter in self._parameters:
            setattr(parameter, _KEPT, self)
        self._forward = ForwardCheck(model, _handle_of)
        # Parameters of a ScriptModule cannot be replaced, and it takes no such hook.
        if communicator.size > 1 and not isinstance(model, torch.jit.ScriptModule):
            handle = model.register_forward_pre_hook(self._forward, prepend=True)
            self._handles.append(handle)

    def __reduce__(self) -> Any:
        """A copy of a parameter has no handle, nor has a saved one, which `torch.load` accepts."""
        return OrderedDict, ()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: no reductions, nor FSDP's reduce-scatters.

        Wrap all passes of a step but the last.
        """
        outside = not self._local
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(outside)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Turn reductions on or off, of FSDP's modules too; `FSDPModule` has the same function."""
        self._local = not requires_gradient_sync
        self._accumulated = self._accumulated or self._local
        for module in self._fsdp:
            module.set_requires_gradient_sync(requires_gradient_sync, recurse=False)

    def synchronize(self) -> None:
        """Reduce the gradients that are there now, which backward has added up in `no_sync()`.

        For pipelines, and replicas whose step has no backward pass. Gradients that were reduced,
        and are the same since, stay as they are.

        Raises:
            RuntimeError: no replica has a gradient of a model with FSDP modules after `no_sync()`;
                or a replica did not respond within the group's timeout.

        Collective: all ranks of the mesh, and the ranks of their shards; blocks on a CPU.
        """
        if self._communicator.size > 1:
            self._break_off()
            accumulated = self._accumulated or self._forward.passes > 0
            whole = bool(self._fsdp) and accumulated
            states = self._end()
            if whole and states and all(bool((s == MISSING).all()) for s in states):
                raise RuntimeError(
                    "adasum_replicate: expected gradients to synchronize, but got none on any "
                    f"replica (rank {dist.get_rank()}); leave the last backward pass of a step "
                    "out of no_sync(), because FSDP keeps whole gradients in it"
                )

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            if getattr(parameter, _KEPT, None) is self:
                setattr(parameter, _KEPT, None)

    def _hook(self, unit: int, number: int, parameter: torch.Tensor) -> None:
        """Note that backward has added to a gradient."""
        progress = self._units[unit]
        before = self._reduced.pop(id(parameter), None)
        if self._communicator.size == 1:
            return
        name = progress.unit.names[number]
        if before is not None and writes_to(parameter.grad, before) == 1:
            action = _checkpoint_action() or (
                "call the optimizer's zero_grad() between steps (after an evaluation the model's "
                "leaves some gradients, and grad.data.zero_() is not seen), and wrap all passes "
                "of a step but the last in no_sync()"
            )
            raise RuntimeError(
                f"adasum_replicate: expected the gradient of {name} to be new or local, but got "
                f"one that was added to the reduced gradient of the last pass; {action}"
            )
        if self._local:
            return
        self._begin()
        self._launch_complete()
        if unit < self._next:
            action = _checkpoint_action() or (
                "accumulate in the handle's no_sync(), not by FSDP's set_requires_gradient_sync, "
                "or pass overlap=False"
            )
            raise RuntimeError(
                f"adasum_replicate: expected backward to add to the gradient of {name} at most "
                f"{progress.expected[number]} times, as in earlier passes, but got once more "
                f"after it was reduced (rank {dist.get_rank()}); {action}"
            )
        progress.fired[number] += 1
        # The program's own hooks may be later ones, and change the gradient yet.
        if next(reversed(parameter._post_accumulate_grad_hooks)) in self._numbers:
            self._launch_complete()

    def _launch_complete(self) -> None:
        """Launch the units whose gradients are there, in order."""
        while (
            self._overlap
            and self._next < len(self._units)
            and self._units[self._next].is_complete
        ):
            self._launch(self._units[self._next])

    def _begin(self) -> None:
        """Note a new backward pass, also after one that ended with an error."""
        current = torch._C._current_graph_task_id()
        if current == self._pass:
            return
        if self._pass is not None:
            self._break_off()
        self._selection.check()
        self._pass = current
        # FSDP's own switch for accumulation shows by the number of forward passes.
        accumulated = self._accumulated or self._forward.passes > 1
        for progress in self._units:
            progress.begin_pass(accumulated)
        # FSDP's own callbacks may fire hooks, too. Those of this pass are in the queue by its end.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._end))

    def _launch(self, progress: Progress) -> None:
        self._launched += self._next == 0
        header = [self._launched, self._next]
        self._next += 1
        unit, gradients = progress.unit, []
        for number, parameter in enumerate(unit.parameters):
            if parameter.grad is None:
                if progress.fired[number]:
                    raise RuntimeError(
                        f"adasum_replicate: expected the gradient of {unit.names[number]} to stay "
                        "until it is reduced, but another hook has taken it away (rank "
                        f"{dist.get_rank()}); call the optimizer's step after backward, not in a "
                        "hook"
                    )
                header.append(MISSING)
                local, dtype = local_of(parameter.detach()), gradient_dtype(parameter)
                gradients.append(torch.zeros_like(local, dtype=dtype))
            else:
                before = self._reduced.get(id(parameter))
                is_reduced = before and writes_to(parameter.grad, before) == 0
                header.append(REDUCED if is_reduced else NEW)
                parameter.grad = complete(parameter.grad, parameter)
                gradients.append(local_of(parameter.grad).detach())
        header += [0] * (self._widest - len(gradients))
        lane = self._lanes[gradients[0].device]
        task = partial(reduce_unit, unit, self.rule, gradients, header)
        self._futures.append((unit, lane.submit(task, gradients)))

    @torch._disable_dynamo
    def _end(self) -> list[torch.Tensor]:
        """Reduce what is left at the end of a pass, and wait; return each unit's states."""
        try:
            for progress in self._units[self._next :]:
                self._launch(progress)
            found = []
            for unit, future in self._futures:
                gradients, everywhere = future.wait()
                self._store(unit, gradients, everywhere)
                found.append(everywhere)
            for progress in self._units:
                progress.end_pass()
            self.rule.end_pass()
            self._accumulated, self._forward.passes = self._local, 0
            self._copies.check()
        finally:
            self._break_off()
        return found

    def _break_off(self) -> None:
        """Forget the present pass; what it has launched ends first."""
        for _, future in self._futures:
            wait_quietly(future)
        self._next, self._futures, self._pass = 0, [], None
        self.rule.begin_pass()
        for progress in self._units:
            progress.begin_pass(accumulated=False)

    def _store(
        self, unit: Unit, gradients: list[torch.Tensor], everywhere: torch.Tensor
    ) -> None:
        """Set gradients that only other replicas had; remember that all of them are reduced."""
        for number, parameter in enumerate(unit.parameters):
            if parameter.grad is None and everywhere[:, number].any():
                parameter.grad = like(parameter, gradients[number])
        self._reduced |= reduced_of(unit.parameters)


def _handle_of(parameter: torch.Tensor) -> ReplicateHandle | None:
    """Return the handle that a parameter has; a copy of one has another object in its place."""
    kept = getattr(parameter, _KEPT, None)
    return kept if isinstance(kept, ReplicateHandle) else None


def _checkpoint_action() -> str:
    """Return what to do if the pass is one that a reentrant checkpoint runs inside of another."""
    inside = is_inside("backward", "torch.utils.checkpoint")
    return "pass use_reentrant=False to checkpoint" if inside else ""


def adasum_replicate(
    model: torch.nn.Module,
    mesh: Any,
    *,
    rule: str | Coefficients = "adasum",
    group_op: str | None = None,
    group_size: int | None = None,
    overlap: bool = True,
) -> ReplicateHandle:
    """Reduce a model's gradients over replicas by AdaSum of whole tensors, from now on.

    Each backward pass must reach a parameter of the model on every replica. Parameters and buffers
    are broadcast from the first replica now. `fully_shard` averages inside a replica.

    Args:
        model: sharded by `fully_shard`, `parallelize_module`, both or neither; what replaces
            parameters comes before. Its optimizer is a plain one, and steps after backward.
            Parameters that are frozen now, or marked with `mark_worker_local`, are left out.
        mesh: the one-dimensional mesh of the replicas, `mesh["replica"]`, or their process group:
            the ranks that hold the same shards.
        rule: as of `adasum_all_reduce`, or "adascale": the mean, and the handle has its `gain`.
        group_op, group_size: as of `adasum_all_reduce`.
        overlap: reduce a module's gradients while backward goes on. False reduces all at the
            end of backward: needed if a pass runs modules more often than every earlier pass did.

    Returns:
        The handle, with `no_sync()` for gradient accumulation, `synchronize()` and `remove()`.

    Raises:
        ValueError: on every rank of the job: the model is not the same on all replicas, or a
            set-up of docs/sharded.md, "Refused set-ups".

    Collective: all ranks of the job, with their own mesh of replicas; blocks. Backward passes are
    collective from then on. They, and forward passes, raise RuntimeError in other refused set-ups.

    References:
        arXiv 2006.02924, section 3; docs/sharded.md.
    """
    replicas = connect(
        "adasum_replicate",
        model,
        mesh,
        lambda _: (rule_of(rule, group_op, group_size), _refuse(model)),
    )
    return ReplicateHandle(model, replicas, overlap)


def _refuse(model: torch.nn.Module) -> dict[str, object]:
    """Raise ValueError if hooks on the parameters of a model would not do; else return {}."""
    for name, module in model.named_modules():
        kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        if isinstance(module, kinds) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"expected dense gradients, but {name or 'the model'} has sparse ones; make it "
                "with sparse=False"
            )
    for name, parameter in model.named_parameters():
        handle = _handle_of(parameter)
        if handle is not None and parameter in handle._selection:
            raise ValueError(
                f"expected a model without AdaSum, but the gradient of {name} is reduced by an "
                "earlier adasum_replicate; call remove() on its handle"
            )
    return {}
