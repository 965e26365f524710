"""AdaSum across replicas of a sharded model: FSDP2, tensor parallelism, both, or neither.

Gradients are reduced as whole tensors. Each rank reduces its shard over the replicas, with
coefficients from the Gram matrix of the whole tensor: the sum of the shards' matrices.

AdaSum is not linear, so it must see each gradient once a step, complete. A unit (the parameters of
one FSDP module, or a bucket of others) is reduced as soon as backward has finished it. A module
that runs twice in a pass fires its hooks twice: earlier passes tell how often to expect them, and
the first pass reduces at its end.

References:
    arXiv 2006.02924, section 3; docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from adasum_hvd.distributed.checks import Call, agree, call_of
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.exchange import Shards
from adasum_hvd.distributed.lanes import Future, Lane, StreamLane, lane_on
from adasum_hvd.distributed.reduction import reduce_buffer
from adasum_hvd.distributed.rules import Coefficients, Rule, rule_of
from adasum_hvd.distributed.sharding import (
    complete,
    like,
    local_of,
    problems,
    shard_groups,
)
from adasum_hvd.distributed.topology import hosts_of

__all__ = ["Replicas", "adasum_replicate"]

_BUCKET_BYTES = 25 << 20  # of parameters outside FSDP modules, as DDP's buckets


class _Unit:
    """Parameters that are reduced together, all of one dtype and device.

    Args:
        parameters: on every replica the same ones.
        names: of the parameters.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]):
        self.parameters, self.names = parameters, names
        self.fired = [0] * len(parameters)  # hooks in this pass, by parameter
        self.expected = [1] * len(parameters)  # the most of any pass so far
        self.passes = 0
        self.reduced = False

    @property
    def is_complete(self) -> bool:
        """Whether this pass has fired as many hooks as any pass so far."""
        return self.passes > 0 and self.fired == self.expected

    def end_pass(self) -> None:
        """Keep what this pass has shown, and begin another one."""
        self.expected = list(map(max, self.expected, self.fired))
        self.fired, self.reduced = [0] * len(self.fired), False
        self.passes += 1


class Replicas:
    """What `adasum_replicate` returns: the hooks on a model's parameters.

    Not made by the program. See :func:`adasum_replicate`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        communicator: Communicator,
        rule: Rule,
        overlap: bool,
    ):
        self._model, self._communicator, self._rule = model, communicator, rule
        self._overlap, self._local = overlap, False
        self._units = list(_units(model))
        self._lanes: dict[torch.device, Lane] = {}
        self._shard_communicators: dict[Any, Communicator] = {}
        for unit in self._units:
            self._prepare(unit)
        self._next = 0  # the unit that is launched next: all ranks launch in one order
        self._futures: list[tuple[_Unit, Future]] = []
        self._pass: int | None = None  # autograd's number of this backward pass
        self._versions: dict[int, int] = {}  # of reduced gradients, by parameter
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._hook, unit, k))
            for unit in self._units
            for k, parameter in enumerate(unit.parameters)
        ]

    def _prepare(self, unit: _Unit) -> None:
        """Make the lane and the process groups of a unit. Collective."""
        device = local_of(unit.parameters[0]).device
        if device not in self._lanes:
            self._lanes[device] = lane_on(device, self._communicator)
        for parameter in unit.parameters:
            for group in shard_groups(parameter):
                if group not in self._shard_communicators:
                    # FSDP uses the group, too, while the lane runs.
                    own = Communicator(group, apart=True)
                    self._shard_communicators[group] = own

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; wrap all passes but the last of a step.

        Modules of FSDP stop their reduce-scatters, too.
        """
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Turn reductions on or off, of FSDP's modules too; `FSDPModule` has the same function.

        Args:
            requires_gradient_sync: False accumulates gradients, True reduces them with the next
                backward pass.
        """
        self._local = not requires_gradient_sync
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(requires_gradient_sync, recurse=False)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, unit: _Unit, number: int, parameter: torch.Tensor) -> None:
        """Note that backward has added to a gradient."""
        if self._local or self._communicator.size == 1:
            return
        self._begin()
        name = unit.names[number]
        if unit.reduced:
            raise RuntimeError(
                f"adasum_replicate: expected backward to add to the gradient of {name} at most "
                f"{unit.expected[number]} times, as in earlier passes, but got once more after it "
                f"was reduced (rank {dist.get_rank()}); pass overlap=False"
            )
        before = self._versions.pop(id(parameter), None)
        if before is not None and _version(parameter.grad) == before + 1:
            raise RuntimeError(
                f"adasum_replicate: expected the gradient of {name} to be new or local, but got "
                "one that was added to the reduced gradient of the last pass; call zero_grad() "
                "between steps, and wrap all passes of a step but the last in no_sync()"
            )
        unit.fired[number] += 1
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
            self._reset()
        self._pass = current
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _launch(self, unit: _Unit) -> None:
        """Begin to reduce a unit's gradients."""
        self._next += 1
        unit.reduced = True
        for parameter in unit.parameters:
            if parameter.grad is not None:
                parameter.grad = complete(parameter.grad, parameter)
        gradients = [
            local_of(parameter if parameter.grad is None else parameter.grad).detach()
            for parameter in unit.parameters
        ]
        present = [parameter.grad is not None for parameter in unit.parameters]
        for number, there in enumerate(present):
            if not there:
                gradients[number] = torch.zeros_like(gradients[number])
        lane = self._lanes[gradients[0].device]
        task = partial(self._reduce, unit, gradients, present)
        self._futures.append((unit, lane.submit(task)))
        if isinstance(lane, StreamLane):
            for gradient in gradients:
                lane.keep(gradient)

    def _reduce(
        self,
        unit: _Unit,
        gradients: list[torch.Tensor],
        present: list[bool],
        communicator: Communicator,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Reduce a unit's gradients in place; runs in the lane.

        Returns:
            The gradients, and bool [replicas, parameters]: which were there before.
        """
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        sizes = [gradient.numel() for gradient in gradients]
        table = torch.tensor(present, dtype=torch.uint8, device=flat.device)
        everywhere = communicator.all_gather(table)
        reduce_buffer(flat, sizes, communicator, self._rule, self._shards(unit))
        for gradient, part in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(part.view(gradient.shape))
        return gradients, everywhere

    def _shards(self, unit: _Unit) -> list[Shards]:
        by_group: dict[Any, list[int]] = {}
        for number, parameter in enumerate(unit.parameters):
            for group in shard_groups(parameter):
                by_group.setdefault(group, []).append(number)
        return [
            Shards(self._shard_communicators[group], tuple(numbers))
            for group, numbers in by_group.items()
        ]

    def _end(self) -> None:
        """Reduce what is left at the end of a backward pass, and wait for all of it."""
        try:
            for unit in self._units[self._next :]:
                self._launch(unit)
            for unit, future in self._futures:
                self._store(unit, *future.wait())
            for unit in self._units:
                unit.end_pass()
        finally:
            self._reset()

    def _reset(self) -> None:
        self._next, self._futures, self._pass = 0, [], None
        for unit in self._units:
            unit.fired, unit.reduced = [0] * len(unit.fired), False

    def _store(
        self, unit: _Unit, gradients: list[torch.Tensor], everywhere: torch.Tensor
    ) -> None:
        """Set gradients that only other replicas had; remember that all of them are reduced."""
        for number, parameter in enumerate(unit.parameters):
            if parameter.grad is None and everywhere[:, number].any():
                parameter.grad = like(parameter, gradients[number])
            if parameter.grad is not None:
                self._versions[id(parameter)] = _version(parameter.grad)


def _version(gradient: Any) -> int:
    """Return how often a gradient was written in place; FSDP writes to the local tensor only."""
    local = local_of(gradient)
    return gradient._version + (0 if local is gradient else local._version)


def _units(model: torch.nn.Module) -> Iterator[_Unit]:
    """Yield a model's units, in about the order in which backward finishes them."""
    owner: dict[int, object] = {}
    for module in model.modules():  # a child comes after its parent
        if isinstance(module, FSDPModule):
            owner |= {id(parameter): module for parameter in module.parameters()}
    found: dict[tuple[Any, ...], list[tuple[str, torch.nn.Parameter]]] = {}
    room: dict[tuple[Any, ...], int] = {}
    for name, parameter in reversed(list(model.named_parameters())):
        if not parameter.requires_grad:
            continue
        local = local_of(parameter)
        key = id(owner.get(id(parameter))), local.dtype, local.device
        room[key] = room.get(key, 0) + local.numel() * local.element_size()
        number = 0 if id(parameter) in owner else room[key] // _BUCKET_BYTES
        found.setdefault((*key, number), []).append((name, parameter))
    for members in found.values():
        yield _Unit([p for _, p in members], [name for name, _ in members])


def _described(model: torch.nn.Module) -> dict[str, object]:
    """Return what must be the same on all replicas."""
    return {
        name: (
            tuple(parameter.shape),
            tuple(local_of(parameter).shape),
            str(parameter.dtype),
            str(getattr(parameter, "placements", "")),
            parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
    }


def adasum_replicate(
    model: torch.nn.Module,
    mesh: Any,
    *,
    rule: str | Coefficients = "adasum",
    group_op: str | None = None,
    group_size: int | None = None,
    overlap: bool = True,
) -> Replicas:
    """Reduce a model's gradients over replicas by AdaSum of whole tensors, from now on.

    After each backward pass all replicas have the same gradients, shard by shard. Parameters and
    buffers are broadcast from the first replica now. `fully_shard` averages inside a replica.

    Args:
        model: sharded by `fully_shard`, `parallelize_module`, both or neither, and already
            distributed as it trains. Its optimizer is a plain one.
        mesh: the one-dimensional mesh of the replicas, `mesh["replica"]`, or their process group:
            the ranks that hold the same shards.
        rule: as of `adasum_all_reduce`.
        group_op: as of `adasum_all_reduce`.
        group_size: as of `adasum_all_reduce`.
        overlap: reduce a module's gradients while backward goes on. False reduces all at the
            end of backward: needed if a pass runs modules more often than the first pass did.

    Returns:
        The handle, with `no_sync()` for gradient accumulation and `remove()`.

    Raises:
        ValueError: on every rank of the mesh: the model is not the same on all replicas, or one
            of HSDP on a two-dimensional mesh, FSDP1, DDP or DeepSpeed ZeRO; or the mesh has
            several dimensions, or ranks in common with the model's.

    Collective: all ranks of the job, with their own mesh of replicas; blocks. Backward passes are
    collective from then on.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        ... # doctest: +SKIP
        >>> fully_shard(model, mesh=mesh["shard"])               # doctest: +SKIP
        >>> replicas = adasum_replicate(model, mesh["replica"])  # doctest: +SKIP

    References:
        arXiv 2006.02924, section 3.
    """
    if getattr(mesh, "ndim", 1) != 1:
        raise ValueError(
            "adasum_replicate: mesh: expected one dimension, the replicas, but got "
            f'{mesh.ndim} dimensions (rank {dist.get_rank()}); pass mesh["replica"]'
        )
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    communicator = Communicator(group, apart=True)
    hosts_of(communicator)
    try:
        checked = rule_of(rule, group_op, group_size)
        found = problems(model, communicator.ranks, dist.get_rank())
        problem = next(found, "")
        call = call_of([], checked.described | _described(model))
        if problem:
            call = Call((), (), "expected a model whose replicas can be told apart, but "
                        f"{problem}")  # fmt: skip
    except ValueError as error:  # on the other ranks, too
        checked, call = Rule("adasum"), Call((), (), str(error))
    agree("adasum_replicate", call, communicator)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = local_of(tensor)
            if local.numel():
                dist.broadcast(local, communicator.ranks[0], group=communicator.group)
    return Replicas(model, communicator, checked, overlap)
