"""Parameters and optimizer states of one rank, given to all.

Horovod has types for eight dtypes. All others travel as their bytes, for nothing is computed
with them; and what can go wrong on one rank alone is gathered before or after they travel.
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

from adasum_hvd.common.agreement import compare_parameters
from adasum_hvd.common.options import ProcessSet
from adasum_hvd.torch import marks
from adasum_hvd.torch.objects import Failure, allgather_object, check_root, ranks_of
from adasum_hvd.torch.wire import write_back

_KNOWN = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
}
Named = tuple[Any, torch.Tensor]


def _start(
    tensor: torch.Tensor, root_rank: int, name: str, process_set: ProcessSet
) -> Callable[[], None]:
    """Begin to broadcast a tensor, in place where it can; the result waits until it is there."""
    here = tensor.detach()
    copy = here.resolve_conj().resolve_neg().contiguous()
    known = here.dtype in _KNOWN
    sent = copy if known else copy.reshape(-1).view(torch.uint8)
    handle = mpi_ops.broadcast_async_(sent, root_rank, name, process_set)

    def finish() -> None:
        mpi_ops.synchronize(handle)
        if copy.data_ptr() != here.data_ptr():
            write_back(here, copy)
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)

    return finish


def _named(params: Any) -> list[Named]:
    """Return (name, tensor) pairs, in the same order on all ranks.

    Raises:
        TypeError: `params` cannot be iterated.
    """
    if isinstance(params, Mapping):
        return sorted(params.items(), key=lambda item: str(item[0]))
    if isinstance(params, torch.Tensor | str) or not isinstance(params, Iterable):
        raise TypeError(
            "expected a state dict, or an iterable of tensors or (name, tensor) pairs, but got "
            f"{type(params).__name__}"
        )
    return [
        param if _is_pair(param) else (index, param)
        for index, param in enumerate(params)
    ]


def _is_pair(param: Any) -> bool:
    pair = isinstance(param, tuple) and len(param) == 2
    return pair and isinstance(param[0], str | None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its values in memory, and nothing besides."""
    strided = tensor.layout is torch.strided and not tensor.is_meta
    return strided and not (
        tensor.is_quantized or is_traceable_wrapper_subclass(tensor)
    )


def _problem_with(tensor: Any) -> str:
    """Say why something cannot travel; nothing where it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"expected a tensor, but got {type(tensor).__name__}"
    if torch.nn.parameter.is_lazy(tensor):
        return "expected a shape, but got a lazy tensor; run one forward pass first"
    if not _is_plain(tensor):
        return (
            "expected a dense tensor of values in memory, but got "
            f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, {tensor.device}); leave "
            "it out, or hvd.broadcast_object it"
        )
    return ""


def _described(params: Any) -> tuple[list[Named], Any]:
    """Return the tensors by name, and what the other ranks must know of them."""
    try:
        named = _named(params)
    except TypeError as error:
        return [], Failure(str(error))
    except Exception as error:  # of the caller's iterable
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
    """Give every rank the root's parameters.

    As Horovod's, and for every dtype and layout of dense tensors. Horovod writes behind
    torch's back; here the tensors count as modified, so that `AdamOffload` notices.

    Args:
        params: a state dict, or an iterable of tensors or (name, tensor) pairs, such as
            `model.named_parameters()`; the same names, shapes and dtypes on all ranks.
        root_rank: the rank, in the job, whose values count.
        process_set: the ranks that take part.

    Raises:
        ValueError: `root_rank` is not in `process_set`; or a rank has something that is no
            dense tensor, or other tensors than the first one; on all ranks, with its name.

    Collective: every rank of `process_set`; blocks.
    """
    check_root("broadcast_parameters", root_rank, process_set)
    named, mine = _described(params)
    theirs = allgather_object(mine, "adasum.parameters", process_set)
    _refuse("broadcast_parameters", theirs, process_set)
    compare_parameters("broadcast_parameters", theirs, mpi_ops.rank())
    finishes = [
        _start(tensor, root_rank, f"adasum.parameters.{index}.{name}", process_set)
        for index, (name, tensor) in enumerate(named)
    ]
    for finish in finishes:
        finish()


def _refuse(what: str, theirs: Iterable[Any], process_set: ProcessSet) -> None:
    """Raise ValueError for the first rank that has failed."""
    for rank, found in zip(ranks_of(process_set), theirs, strict=True):
        if isinstance(found, Failure):
            raise ValueError(
                f"{what}: {found.text} (on rank {rank}; this is rank {mpi_ops.rank()} of "
                f"{mpi_ops.size()})"
            )


class _Outline(cloudpickle.Pickler):
    """Pickles anything but the memory of the tensors in it, which it lists."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}  # by id

    def persistent_id(self, obj: Any) -> int | None:
        """Return the place of a tensor whose memory travels by itself."""
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


class _Filled(pickle.Unpickler):
    """Undoes :class:`_Outline`."""

    def __init__(self, outline: bytes, tensors: list[torch.Tensor]):
        super().__init__(io.BytesIO(outline))
        self._tensors = tensors

    def persistent_load(self, place: int) -> torch.Tensor:
        """Return the tensor at a place."""
        return self._tensors[place]


def _outlined(optimizer: torch.optim.Optimizer) -> tuple[Any, list[torch.Tensor]]:
    """Return what the others need to make room for a state, and its tensors."""
    file = io.BytesIO()
    pickler = _Outline(file)
    try:
        pickler.dump(optimizer.state_dict())
    except Exception as error:  # of the optimizer, or of an object in its state
        return Failure(error), []
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in pickler.tensors]
    return (file.getvalue(), shapes), pickler.tensors


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
    *,
    keep: bool = False,
) -> None:
    """Give every rank the root's optimizer state and hyperparameters.

    Horovod's takes a step with zero gradients where there is no state yet, which decays
    weights, and for a distributed optimizer is collective on some ranks only after one of
    them has loaded a checkpoint. This one only copies, tensors of every dtype in whatever
    they are kept, and leaves the state of parameters that are marked (worker-local, or
    replicated over some ranks) as it is on each rank.

    Args:
        optimizer: any torch optimizer, distributed or not.
        root_rank: the rank, in the job, whose state counts.
        model: not needed; Horovod finds sparse embeddings in it, for the step it takes.
        process_set: the ranks that take part.
        keep: take part, and keep the own state on this rank.

    Raises:
        ValueError: `root_rank` is not in `process_set`, the root's state does not pickle, or
            a rank's optimizer cannot load it; on all ranks.

    Collective: every rank of `process_set`; blocks.
    """
    what = "broadcast_optimizer_state"
    check_root(what, root_rank, process_set)
    is_root = mpi_ops.rank() == root_rank
    mine, tensors = _outlined(optimizer) if is_root else (None, [])
    gathered = allgather_object(mine, "adasum.optimizer_state", process_set)
    _refuse(what, gathered, process_set)
    outline, shapes = gathered[list(ranks_of(process_set)).index(root_rank)]
    # One tensor at a time, through the host: a pickle of everything may pass MPI's 2 GiB.
    received = []
    for index, (shape, dtype) in enumerate(shapes):
        copy = tensors[index].cpu() if is_root else torch.empty(shape, dtype=dtype)
        name = f"adasum.optimizer_state.{index}"
        _start(copy, root_rank, name, process_set)()
        received.append(copy)
    failure = None if is_root or keep else _load(optimizer, outline, received)
    theirs = allgather_object(failure, "adasum.optimizer_state.loaded", process_set)
    _refuse(what, theirs, process_set)


def _load(
    optimizer: torch.optim.Optimizer, outline: bytes, tensors: list[torch.Tensor]
) -> Failure | None:
    try:
        state = _Filled(outline, tensors).load()
        _keep_own(optimizer, state["state"])
        optimizer.load_state_dict(state)
    except Exception as error:  # of the optimizer, for the others to hear of
        return Failure(
            f"expected an optimizer that loads the root's state, but got {type(error).__name__}: "
            f"{error}; build it alike on every rank"
        )
    return None


def _keep_own(optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
    """Put this rank's own state back for parameters that not all ranks hold."""
    own = optimizer.state_dict()["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        if marks.is_marked(parameter):
            state.pop(index, None)
            if index in own:
                state[index] = own[index]
