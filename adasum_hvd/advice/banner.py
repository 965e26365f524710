"""The lines that name what is in force: for an optimizer, and on rank 0 after `init`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adasum_hvd import __version__
from adasum_hvd.advice import learning_rate
from adasum_hvd.common import ops
from adasum_hvd.common.options import Options


def banner(
    options: Options,
    settings: dict[str, object],
    backend: str,
    path: str,
    wire: Sequence[str],
    extra: dict[str, int],
    study: str = "momentum",
) -> str:
    """Return one line that says what is in force: backend, ranks, groups, variant, rate, wire.

    Args:
        options: the optimizer's.
        settings: the op's, as `binding.settings` gives them.
        backend: "MPI" or "Gloo".
        path: how the ranks reach each other, as `binding.transport_description` says it.
        wire: the dtypes that travel.
        extra: bytes beside the optimizer's own, "device" and "host".
        study: the name in `learning_rate.FIGURES` of what says most of the optimizer.
    """
    parts = [
        f"adasum_hvd: {options.op.name} "
        f"({'delta' if options.is_delta else 'gradient'} variant)",
        f"{options.process_set.size()} ranks on {backend}",
        f"exchange over {path or 'what the first reduction finds'}",
        _groups(settings) if ops.is_adasum(options.op) else "no groups",
        *_advice(options.op, options.process_set.size(), settings, study),
        f"{options.backward_passes_per_step} backward passes and {options.local_steps} local "
        "steps per reduction",
        f"{' and '.join(wire) or 'nothing'} on the wire",
        f"{settings['kernels']} kernels",
        f"extra memory {extra['device'] / 2**20:.1f} MiB device, "
        f"{extra['host'] / 2**20:.1f} MiB host",
    ]
    return "; ".join(parts)


def _groups(settings: Mapping[str, object]) -> str:
    if settings["group_op"] == "adasum":
        return "AdaSum all the way"
    size = settings["group_size"] or "a host's"
    return f"{settings['group_op']} over groups of {size} ranks, AdaSum across"


def started(
    settings: Mapping[str, object], backend: str, ranks: int, hosts: int, path: str
) -> str:
    """Return what `init` says on rank 0: version, ranks, hosts, path, groups, variant.

    Args:
        settings: the op's, as `binding.settings` gives them.
        backend: "MPI" or "Gloo".
        ranks: of the job.
        hosts: of the job.
        path: as `binding.transport_description` says it, "" before the first reduction.

    Example:
        >>> started({"group_op": "adasum"}, "Gloo", 2, 1, "shared memory")
        '0.2.0: 2 ranks on 1 host over Gloo; exchange over shared memory; AdaSum all the way'
    """
    host = "host" if hosts == 1 else "hosts"
    against = learning_rate.variant_advice(ops.AdasumDelta, ranks)
    parts = [
        f"{__version__}: {ranks} ranks on {hosts} {host} over {backend}",
        *([f"exchange over {path}"] if path else []),
        _groups(settings),
        *(
            [f"op=AdasumGrad: under momentum, AdasumDelta is {against}"]
            if against
            else []
        ),
    ]
    return "; ".join(parts)


def _advice(
    op: ops.ReduceOp, ranks: int, settings: dict[str, object], study: str
) -> list[str]:
    """Return what the figures say of this variant and its learning rate, where they do."""
    group_op, group_size = str(settings["group_op"]), int(str(settings["group_size"]))
    if group_op != "adasum" and group_size == 0:
        return []
    needed = {op} if group_op == "adasum" else {op, ops.parse(group_op)}
    if not needed <= learning_rate.FIGURES[study].rows.keys():
        return []
    groups = group_op, max(1, group_size)
    rate = learning_rate.adasum_lr(1.0, op, ranks, *groups, optimizer=study)
    start = f"learning rate {rate.factor:.3g} times the best of one worker"
    against = learning_rate.variant_advice(op, ranks, study)
    return [f"{start} ({rate.certainty})", *([against] if against else [])]
