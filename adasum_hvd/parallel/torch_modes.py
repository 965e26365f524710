"""Detection of parallel modes from torch's own objects.

It imports no framework: objects of a package exist only after the package was imported, so a class
that is not in `sys.modules` is not in use.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from adasum_hvd.parallel.context import ParallelContext
from adasum_hvd.parallel.findings import ParallelModeFinding as Finding

_WRAPPERS = {  # of modules
    "ddp": ("torch.nn.parallel", "DistributedDataParallel"),
    "fsdp1": ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    "fsdp2": ("torch.distributed.fsdp", "FSDPModule"),
}


def _is(value: Any, module: str, *names: str) -> bool:
    """Return whether `value` is an instance of a class that has been loaded."""
    loaded = sys.modules.get(module)
    return any(isinstance(value, getattr(loaded, name, ())) for name in names)


def _is_deepspeed(value: Any) -> bool:
    # deepspeed.ops has plain torch optimizers, such as DeepSpeedCPUAdam, which are supported.
    return any(
        cls.__module__.startswith("deepspeed.runtime.") for cls in type(value).__mro__
    )


def _named(parameters: Sequence[Any], example: str) -> str:
    plural = "s" if len(parameters) > 1 else ""
    return f"{len(parameters)} parameter{plural} {example}"


def _is_shard(parameter: Any) -> bool:
    """Return whether a parameter is a DTensor, or the local part of a sharded one."""
    if (layout := getattr(parameter, "_st_info", None)) is None:
        return _is(parameter, "torch.distributed.tensor", "DTensor")
    return any(  # torch trains local parts under DDP
        layout.mesh.size(dimension) > 1 and not placement.is_replicate()
        for dimension, placement in enumerate(layout.placements)
    )


def _in_parameters(parameters: Sequence[Any], shard_mode: str) -> Iterator[Finding]:
    flat = [
        p
        for p in parameters
        # FSDP1 sets this attribute with use_orig_params=True.
        if _is(p, "torch.distributed.fsdp", "FlatParameter")
        or getattr(p, "_fsdp_flattened", False)
    ]
    if flat:
        yield Finding("fsdp1", _named(flat, "of FullyShardedDataParallel"))
    if shards := [p for p in parameters if _is_shard(p)]:
        layout = getattr(shards[0], "_st_info", shards[0])
        mesh = layout.device_mesh
        axes = f" named {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        placed = (
            f"that are DTensors (FSDP2 or tensor parallelism), placed "
            f"{tuple(layout.placements)} on a mesh of shape {tuple(mesh.shape)}{axes}"
        )
        yield Finding(shard_mode, _named(shards, placed))
    if partitioned := [p for p in parameters if hasattr(p, "ds_id")]:
        yield Finding("deepspeed", _named(partitioned, "of DeepSpeed ZeRO stage 3"))
    devices = {str(p.device) for p in parameters if p.device.type != "cpu"}
    if len(devices) > 1:
        yield Finding("several_devices", f"parameters on {', '.join(sorted(devices))}")


def _in_optimizer(optimizer: Any) -> Iterator[Finding]:
    if _is(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
        yield Finding("zero_redundancy", "a ZeroRedundancyOptimizer")
    if _is_deepspeed(optimizer):
        yield Finding("deepspeed", f"DeepSpeed's {type(optimizer).__name__}")


def _keeps_local(module: Any) -> bool:
    """Return whether DDP has `adasum_hvd.torch.ddp.keep_local_hook`, which reduces nothing."""
    hooks = getattr(module, "_comm_hooks", ())
    return any(getattr(hook, "keeps_local", False) for hook, _ in hooks)


def _in_model(model: Any) -> Iterator[Finding]:
    kind = type(model).__name__
    pipelining = "torch.distributed.pipelining"
    if _is(model, pipelining, "PipelineStage", "Pipe") and model.num_stages > 1:
        stages = model.num_stages
        yield Finding("pipeline", f"a {kind} of {stages} stages", stages)
    if _is_deepspeed(model):
        stage = model.zero_optimization_stage()
        yield Finding("deepspeed", f"a {kind} with ZeRO stage {stage}")
    inner = getattr(model, "submod", model)
    has_modules = hasattr(inner, "modules")
    if not (has_modules or model is None or _is_deepspeed(model)):
        raise TypeError(
            "model: expected a module, an engine, or a pipeline's stage or pipe, but got "
            f"{kind}; pass one of these, such as one stage for a schedule"
        )
    modules = [*inner.modules()] if has_modules else []
    modules = [module for module in modules if not _keeps_local(module)]
    for mode, (package, name) in _WRAPPERS.items():
        if any(_is(module, package, name) for module in modules):
            yield Finding(mode, f"a module of {name}")


def reduced_by_ddp(parameters: Iterable[Any]) -> bool:
    """Return whether a DistributedDataParallel has reduced the gradients of these parameters."""
    package = sys.modules.get("torch.nn.parallel")
    distributed = sys.modules.get("torch.distributed")
    if package is None or distributed is None:
        return False
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    kind = package.DistributedDataParallel
    ours = {id(parameter) for parameter in parameters}
    return any(
        issubclass(type(module), kind)
        # DDP was called, and not inside no_sync() the last time; its __init__ may have failed.
        and getattr(module, "_lazy_init_ran", False)
        and module.require_forward_param_sync
        and module.process_group.size() > 1
        and not _keeps_local(module)
        and any(id(parameter) in ours for parameter in module.parameters())
        for module in gc.get_objects()
    )


def detect(
    parameters: Iterable[Any] = (), optimizer: Any = None, model: Any = None
) -> list[Finding]:
    """Return the modes, once each, of tensors to reduce and a module, engine, stage or pipe."""
    found = [*_in_optimizer(optimizer), *_in_model(model)]
    has_fsdp2 = any(each.mode == "fsdp2" for each in found)
    found += _in_parameters(list(parameters), "fsdp2" if has_fsdp2 else "dtensor")
    first: dict[str, Finding] = {}
    for each in found:
        first.setdefault(each.mode, each)
    return list(first.values())


def context_of(findings: Sequence[Finding], size: int) -> ParallelContext:
    """Return the findings of `size` ranks as a `ParallelContext`."""
    return ParallelContext(
        mode="stand_alone" if size == 1 else "data_parallel",
        device_num=size,
        pipeline_stages=min(max((f.stages for f in findings), default=1), size),
        enable_parallel_optimizer=any(f.shards_optimizer for f in findings),
        gradients_mean=True,
    )
