"""A check before each training forward pass: the model is still the one that hooks were put on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from adasum_hvd.base.frames import is_inside
from adasum_hvd.distributed.sharding import is_dtensor, is_fsdp_module, is_reduced

_WRAPPERS = "_checkpoint_wrapped_module.", "_orig_mod."  # in the names of parameters


def is_replicated(module: torch.nn.Module) -> bool:
    """Return whether torch's composable `replicate`, a DDP, was called on a module."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    registry = contract._get_registry(module) if contract is not None else None
    return "replicate" in (registry or ())


class ForwardCheck:
    """A forward pre-hook that raises if a trained parameter of the model is not a reduced one.

    A copy of the model, or a saved one, has a check that does nothing.
    """

    def __init__(
        self, model: torch.nn.Module, handle_of: Callable[[torch.Tensor], object]
    ):
        self._handle_of = handle_of
        self._names: set[str] = set()  # for which FSDP may have others for a while
        self._sharded = [*filter(is_fsdp_module, model.modules())]
        if self._sharded:
            self._names = {_plain(name) for name, _ in model.named_parameters()}
        trained = filter(handle_of, model.parameters())
        self._meshes = [p.device_mesh for p in trained if is_dtensor(p)]
        self.passes = 0  # since the owner set it to 0

    def __reduce__(self) -> Any:
        return partial, (_ignore,)

    def __call__(self, model: torch.nn.Module, inputs: object) -> None:
        """Raise RuntimeError if trained parameters are not reduced.

        Also if DDP averages them, or a failed backward pass has left FSDP's layers unfit.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.passes += 1
        # Not inside backward, where checkpointed layers run again.
        if torch._C._current_graph_task_id() == -1:
            check_ended("adasum_replicate", self._sharded)
        for name, parameter in model.named_parameters():
            if self._is_new(name, parameter):
                # torch.func.functional_call: these parameters are the caller's to reduce.
                if is_inside("_functional_call", "torch.nn.utils.stateless"):
                    return
                raise RuntimeError(
                    "adasum_replicate: expected the parameters that the model had at the call, but "
                    f"got another one as {name}, which is not reduced (rank {dist.get_rank()}); "
                    "call adasum_replicate after everything that replaces parameters (fully_shard, "
                    "load_state_dict(assign=True), new layers), or remove() and call it again"
                )
        active = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        averaged = getattr(active, "_module_parameters", ())
        if is_replicated(model) or any(map(self._handle_of, averaged)):
            raise RuntimeError(
                "adasum_replicate: expected a model outside DistributedDataParallel, but it is "
                f"inside one, which averages the gradients (rank {dist.get_rank()}); leave it out"
            )

    def _is_new(self, name: str, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is trained, and neither reduced nor FSDP's for a while."""
        if self._handle_of(parameter) or not is_reduced(parameter):
            return False
        # FSDP puts whole parameters in the place of its shards while a module runs. These have
        # known names, and are not on the mesh of the shards.
        if _plain(name) not in self._names:
            return True
        return is_dtensor(parameter) and parameter.device_mesh in self._meshes


def check_ended(caller: str, sharded: Iterable[Any]) -> None:
    """Raise RuntimeError if FSDP has not ended the last backward pass of these modules."""
    for module in sharded:
        context = getattr(module._get_fsdp_state(), "_state_ctx", None)
        if getattr(context, "post_backward_final_callback_queued", False):
            raise RuntimeError(
                f"{caller}: expected the last backward pass to have ended, but it raised an error, "
                f"after which layers of fully_shard train no more (rank {dist.get_rank()}); call "
                "the model's zero_grad(), then reset_iter_state() of each outermost one that ran, "
                "on every rank (torch 2.13), or resume from a checkpoint"
            )


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _ignore(*_: object) -> None:
    """Do nothing: the check of a copy."""
