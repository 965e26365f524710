"""Objects over the ranks, on any process set."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd.torch import marks


def allgather_object(
    obj: Any, name: str | None = None, process_set: Any = mpi_ops.global_process_set
) -> list[Any]:
    """Return every rank's `obj`, in rank order; Horovod's knows the global process set only.

    Args:
        obj: anything that pickles.
        name: base name of the two tensors that travel.
        process_set: the ranks that take part.

    Raises:
        pickle.PicklingError: `obj` does not pickle.

    Collective: every rank of `process_set`; blocks.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    base = name or "adasum.allgather_object"
    lengths = mpi_ops.allgather(
        torch.tensor([data.numel()]), name=f"{base}.length", process_set=process_set
    )
    everything = mpi_ops.allgather(data, name=f"{base}.data", process_set=process_set)
    return [
        pickle.loads(part.numpy().tobytes())
        for part in everything.split(lengths.tolist())
    ]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give every rank the root's parameters.

    As Horovod's, and also for bfloat16, which Horovod has no type for. Horovod writes behind
    torch's back; here the tensors count as modified, so that `AdamOffload` notices.

    Args:
        params: a state dict, or a list of tensors or (name, tensor) pairs.
        root_rank: the rank whose values count.

    Raises:
        ValueError: `params` is neither a dict nor a list.

    Collective: every rank; blocks.
    """
    if not isinstance(params, dict | list):
        raise ValueError(
            "broadcast_parameters: required a dict or a list, got "
            f"{type(params).__name__}"
        )
    listed = sorted(params.items()) if isinstance(params, dict) else params
    named = [p if isinstance(p, tuple) else (None, p) for p in listed]
    carried = []
    for name, tensor in named:
        bits = tensor.detach()
        if bits.dtype == torch.bfloat16:
            bits = bits.view(torch.int16)
        sent = bits.contiguous()
        handle = mpi_ops.broadcast_async_(sent, root_rank, name)
        carried.append((handle, tensor, bits, sent))
    for handle, tensor, bits, sent in carried:
        mpi_ops.synchronize(handle)
        if sent is not bits:
            bits.copy_(sent)
        torch.autograd.graph.increment_version(tensor)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
    process_set: Any = mpi_ops.global_process_set,
) -> None:
    """Give every rank the root's optimizer state and hyperparameters.

    Horovod's takes a step with zero gradients where there is no state yet, which decays
    weights, and for a distributed optimizer is collective on some ranks only after one of
    them has loaded a checkpoint. This one only copies, and leaves the state of parameters that
    are marked (worker-local, or replicated over some ranks) as it is on each rank.

    Args:
        optimizer: any torch optimizer, distributed or not.
        root_rank: the rank, in the job, whose state counts.
        model: not needed; Horovod finds sparse embeddings in it, for the step it takes.
        process_set: the ranks that take part.

    Raises:
        ValueError: `root_rank` is not in `process_set`; on all its ranks.

    Collective: every rank of `process_set`; blocks.
    """
    ranks = process_set.ranks or range(mpi_ops.size())
    if root_rank not in ranks:
        raise ValueError(
            f"broadcast_optimizer_state: required a root_rank of {list(ranks)}, got {root_rank}"
        )
    root = list(ranks).index(root_rank)
    is_root = mpi_ops.rank() == root_rank
    tensors: list[torch.Tensor] = []
    outline = _outline(optimizer.state_dict(), tensors) if is_root else None
    shapes = [(tuple(t.shape), t.dtype) for t in tensors]
    gathered = allgather_object(
        (outline, shapes), "adasum.optimizer_state", process_set
    )
    outline, shapes = gathered[root]
    # One tensor at a time, through the host: a pickle of everything may pass MPI's 2 GiB.
    received = []
    for index, (shape, dtype) in enumerate(shapes):
        copy = (
            tensors[index].cpu().contiguous()
            if is_root
            else torch.empty(shape, dtype=dtype)
        )
        mpi_ops.broadcast_(
            copy,
            root_rank,
            name=f"adasum.optimizer_state.{index}",
            process_set=process_set,
        )
        received.append(copy)
    if not is_root:
        state = _fill(outline, received)
        _keep_own(optimizer, state["state"])
        optimizer.load_state_dict(state)


def _keep_own(optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
    """Put this rank's own state back for parameters that not all ranks hold."""
    own = optimizer.state_dict()["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        if marks.is_marked(parameter):
            state.pop(index, None)
            if index in own:
                state[index] = own[index]


class _Place(int):
    """Where a tensor was in an outline: its index in the list of tensors."""


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` with every tensor replaced by its place, and append it to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _outline(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_outline(item, tensors) for item in value)
    return value


def _fill(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Undo :func:`_outline`."""
    if isinstance(value, _Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _fill(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fill(item, tensors) for item in value)
    return value
