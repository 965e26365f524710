"""Parallel modes that were detected and that AdaSum does not support, and their error."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

_PARTS = (
    "each rank holds other parts of the parameters, and adding parts of different tensors "
    "means nothing"
)
_REDUCED = "gradients are averaged already, so that AdaSum would get equal ones"
_SHARDED = (
    "keep the plain optimizer and call adasum_hvd.distributed.adasum_replicate(model, "
    'mesh["replica"]), which reduces whole tensors over the replicas of a sharded model'
)

# mode -> (why AdaSum cannot mix with it, what to do)
_REASONS = {
    "ddp": (
        _REDUCED,
        "keep the plain optimizer and call ddp.register_comm_hook(AdasumState(), adasum_hook), of "
        "adasum_hvd.distributed, or pass the module inside, ddp.module, to the training loop (with "
        "op=AdasumDelta: register keep_local_hook)",
    ),
    "fsdp1": (
        _PARTS + "; FSDP also reduces the gradients itself",
        "train the unwrapped module, or shard it by fully_shard and use "
        "adasum_hvd.distributed.adasum_replicate",
    ),
    "fsdp2": (_PARTS + "; fully_shard also reduces the gradients itself", _SHARDED),
    "dtensor": (
        _PARTS,
        _SHARDED + "; or mark_worker_local() the parameters that only this rank steps",
    ),
    "zero_redundancy": (
        "each rank steps a share of the parameters and then sends it to the other ranks",
        "give DistributedOptimizer the optimizer that ZeroRedundancyOptimizer was made from",
    ),
    "deepspeed": (
        "its engine reduces, shards and steps by itself",
        "give DistributedOptimizer a plain torch optimizer over the module's parameters",
    ),
    "pipeline": (
        "each rank holds another stage of the model, and adding different layers means nothing",
        "use one stage, or reduce each stage over its replicas with mark_replicated_over() or "
        "adasum_hvd.distributed.adasum_replicate",
    ),
    "several_devices": (
        "Horovod pins a rank to one device, and a model cut over several is known to stop "
        "learning (horovod#2244)",
        "start one rank per device, each with the whole model",
    ),
    "tf_strategy": (
        "the strategy replicates and reduces the variables itself",
        "build and train the model outside of the strategy's scope, one rank per device",
    ),
    "keras_distribution": (
        "keras.distribution shards or replicates the variables itself",
        "call keras.distribution.set_distribution(None), and start one rank per device",
    ),
}
FOUND_MODES = tuple(_REASONS)


class ParallelModeFinding(NamedTuple):
    """A mode of `FOUND_MODES` on a rank, `found`, the object that shows it, and its `stages`."""

    mode: str
    found: str
    stages: int = 1

    @property
    def shards_optimizer(self) -> bool:
        """Whether optimizer states are spread over the ranks in this mode."""
        return self.mode in ("fsdp1", "fsdp2", "zero_redundancy", "deepspeed")


def refuse(
    findings: Sequence[Sequence[ParallelModeFinding]],
    allow_modes: Collection[str] = (),
    rank: int = 0,
) -> None:
    """Raise for the first mode that was detected on any rank and is not allowed.

    Args:
        findings: of all ranks in the job, in rank order; equal on all ranks, so that all raise.
        allow_modes: modes of `FOUND_MODES` that are no error.
        rank: of the caller, for the message.

    Raises:
        RuntimeError: a mode that is not allowed, with the ranks, the reason and the remedy.
        ValueError: `allow_modes` has an unknown mode.
    """
    if isinstance(allow_modes, str) or not set(allow_modes) <= _REASONS.keys():
        raise ValueError(
            f"allow_modes: expected names of {', '.join(_REASONS)}, but got {allow_modes!r}"
        )
    refused = [
        (where, finding)
        for where, of_rank in enumerate(findings)
        for finding in of_rank
        if finding.mode not in allow_modes
    ]
    if not refused:
        return
    first = refused[0][1]
    ranks = sorted({where for where, finding in refused if finding.mode == first.mode})
    some = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    because, remedy = _REASONS[first.mode]
    raise RuntimeError(
        f"AdaSum: expected the same whole model on every rank, but got {first.found} on "
        f"{'all ranks' if len(ranks) == len(findings) else some}: {because}; {remedy}, or pass "
        f'allow_modes=("{first.mode}",) if you know that it is right (this is rank {rank} of '
        f"{len(findings)})"
    )
