"""Broadcasts of parameters and optimizer states.

Horovod supports eight dtypes. Tensors of other dtypes are sent as bytes. Errors that can occur
on one rank alone are gathered before or after the broadcast, so that every rank raises them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from horovod.torch import mpi_ops
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from adasum_hvd.base.agreement import compare_parameters
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.torch import marks
from adasum_hvd.torch.objects import Failure, allgather_object, check_root, ranks_of
from adasum_hvd.torch.wire import write_back

_SUPPORTED = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
}
_REMEDY = (
    "build the same model on every rank, or pass the tensors that all ranks have, and "
    "process_set= with the ranks of the others"
)
Named = tuple[Any, torch.Tensor]


def _start(
    tensor: torch.Tensor, root_rank: int, name: str, process_set: ProcessSet
) -> Callable[[], None]:
    """Start to broadcast a tensor, in place if possible; return a function that waits."""
    values = tensor.detach()
    copy = values.resolve_conj().resolve_neg().contiguous()
    sent = copy if values.dtype in _SUPPORTED else copy.reshape(-1).view(torch.uint8)
    handle = mpi_ops.broadcast_async_(sent, root_rank, name, process_set)

    def finish() -> None:
        mpi_ops.synchronize(handle)
        if copy.data_ptr() != values.data_ptr():
            write_back(values, copy)
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)

    return finish


def _named(params: Any) -> list[Named]:
    """Return (name, tensor) pairs, in the same order on all ranks."""
    if isinstance(params, Mapping):
        return sorted(params.items(), key=lambda item: str(item[0]))
    if isinstance(params, torch.Tensor | str) or not isinstance(params, Iterable):
        raise TypeError(
            "expected a state dict, or an iterable of tensors or (name, tensor) pairs, but got "
            f"{type(params).__name__}"
        )
    return [p if _is_pair(p) else (index, p) for index, p in enumerate(params)]


def _is_pair(param: Any) -> bool:
    pair = isinstance(param, tuple) and len(param) == 2
    return pair and isinstance(param[0], str | None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fully described by its values in memory."""
    strided = tensor.layout is torch.strided and not tensor.is_meta
    wrapped = tensor.is_quantized or is_traceable_wrapper_subclass(tensor)
    return strided and not wrapped


def _problem_with(tensor: Any) -> str:
    """Return why an object cannot be broadcast, or ""."""
    if not isinstance(tensor, torch.Tensor):
        return f"expected a tensor, but got {type(tensor).__name__}"
    if torch.nn.parameter.is_lazy(tensor):
        return "expected a shape, but got a lazy tensor; run one forward pass first"
    if not _is_plain(tensor):
        return (
            "expected a dense tensor of values in memory, but got "
            f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, {tensor.device}); leave "
            "it out, or use hvd.broadcast_object"
        )
    return ""


def _described(params: Any) -> tuple[list[Named], Any]:
    """Return the (name, tensor) pairs, and their description for the other ranks."""
    try:
        named = _named(params)
    except TypeError as error:
        return [], Failure(str(error))
    except Exception as error:  # raised by the caller's iterable
        return [], Failure(error)
    for name, tensor in named:
        if problem := _problem_with(tensor):
            return [], Failure(f"{name}: {problem}")
    return named, [
        (str(name), tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named
    ]


def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> None:
    """Copy the root's parameters to every rank.

    Unlike Horovod's function it supports every dtype and layout of dense tensors, and it
    increments the tensors' versions, by which `AdamOffload` detects changes.

    Args:
        params: a state dict, or an iterable of tensors or (name, tensor) pairs, such as
            `model.named_parameters()`; the same names, shapes and dtypes on all ranks.
        root_rank: the rank, in the job, whose values count.
        process_set: the ranks of the broadcast.

    Raises:
        ValueError: `root_rank` is not in `process_set`; or a rank's `params` hold an object that
            is not a dense tensor, or differ from the first rank's. On all ranks, with its name.

    Collective: every rank of `process_set`; blocks.
    """
    caller = "broadcast_parameters"
    check_root(caller, root_rank, process_set)
    named, description = _described(params)
    by_rank = _gather(caller, description, "adasum.parameters", process_set)
    compare_parameters(caller, by_rank, mpi_ops.rank(), remedy=_REMEDY)
    finishes = [
        _start(tensor, root_rank, f"adasum.parameters.{index}.{name}", process_set)
        for index, (name, tensor) in enumerate(named)
    ]
    for finish in finishes:
        finish()


def _gather(caller: str, result: Any, name: str, process_set: ProcessSet) -> list[Any]:
    """Return every rank's result; ValueError with the first rank that has failed."""
    by_rank = allgather_object(result, name, process_set)
    for rank, each in zip(ranks_of(process_set), by_rank, strict=True):
        if isinstance(each, Failure):
            raise ValueError(
                f"{caller}: {each.text} (on rank {rank}, seen by rank {mpi_ops.rank()} of "
                f"{mpi_ops.size()})"
            )
    return by_rank


class _Outline(cloudpickle.Pickler):
    """Pickles an object without the memory of its plain tensors, which are in `tensors`."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}  # by id

    def persistent_id(self, obj: Any) -> int | None:
        """Return the key of a tensor whose memory is sent separately."""
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return None
        self.tensors[id(obj)] = obj
        return id(obj)


class _OutlineReader(pickle.Unpickler):
    """The inverse of :class:`_Outline`."""

    def __init__(self, outline: bytes, tensors: dict[int, torch.Tensor]):
        super().__init__(io.BytesIO(outline))
        self._tensors = tensors

    def persistent_load(self, key: int) -> torch.Tensor:
        """Return the tensor with this key."""
        return self._tensors[key]


def _outlined(optimizer: torch.optim.Optimizer) -> tuple[Any, dict[int, torch.Tensor]]:
    """Return a state's (outline, shapes and dtypes) for the other ranks, and its tensors."""
    file = io.BytesIO()
    pickler = _Outline(file)
    try:
        pickler.dump(optimizer.state_dict())
    except Exception as error:  # raised by the optimizer or an object in its state
        return Failure(error), {}
    shapes = {key: (tuple(t.shape), t.dtype) for key, t in pickler.tensors.items()}
    return (file.getvalue(), shapes), pickler.tensors


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
    *,
    keep: bool = False,
) -> None:
    """Copy the root's optimizer state and hyperparameters to every rank.

    Unlike Horovod's function it takes no step, supports any dtype and nesting of the state, and
    leaves the state of marked parameters (worker-local, or replicated over some ranks) as it is.

    Args:
        optimizer: any torch optimizer, distributed or not.
        root_rank: the rank, in the job, whose state counts.
        model: ignored; Horovod's function needs it for sparse embeddings.
        process_set: the ranks of the broadcast.
        keep: participate, but keep this rank's own state.

    Raises:
        ValueError: `root_rank` is not in `process_set`, the root's state cannot be pickled, or
            a rank's optimizer cannot load it; on all ranks.

    Collective: every rank of `process_set`; blocks.
    """
    caller = "broadcast_optimizer_state"
    check_root(caller, root_rank, process_set)
    is_root = mpi_ops.rank() == root_rank
    outlined, tensors = _outlined(optimizer) if is_root else (None, {})
    by_rank = _gather(caller, outlined, "adasum.optimizer_state", process_set)
    outline, shapes = by_rank[ranks_of(process_set).index(root_rank)]
    # One tensor at a time, through the host: a pickle of the state may exceed MPI's 2 GiB.
    received = {}
    for index, (key, (shape, dtype)) in enumerate(shapes.items()):
        copy = tensors[key].cpu() if is_root else torch.empty(shape, dtype=dtype)
        _start(copy, root_rank, f"adasum.optimizer_state.{index}", process_set)()
        received[key] = tensors.get(key, copy)
    # On the root, too: torch casts a state that it loads, and keeps tensors that it need not cast.
    failure = None if keep else _load(optimizer, outline, received)
    _gather(caller, failure, "adasum.optimizer_state.loaded", process_set)


def _load(
    optimizer: torch.optim.Optimizer, outline: bytes, tensors: dict[int, torch.Tensor]
) -> Failure | None:
    try:
        state = _OutlineReader(outline, tensors).load()
        _keep_own(optimizer, state["state"])
        optimizer.load_state_dict(state)
    except Exception as error:  # raised by the optimizer; every rank reports it
        return Failure(
            "expected an optimizer that loads the root's state, but got "
            f"{type(error).__name__}: {error}; build it alike on every rank"
        )
    return None


def _keep_own(optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
    """Replace the root's state of marked parameters by this rank's own."""
    own = optimizer.state_dict()["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        if marks.is_marked(parameter):
            state.pop(index, None)
            if index in own:
                state[index] = own[index]
