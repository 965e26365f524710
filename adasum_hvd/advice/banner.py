"""One-line descriptions of a job: for an optimizer, and on rank 0 after `init`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adasum_hvd import __version__
from adasum_hvd.advice import learning_rate
from adasum_hvd.base import ops
from adasum_hvd.base.options import Options


def banner(
    options: Options,
    settings: dict[str, object],
    backend: str,
    path: str,
    wire: Sequence[str],
    extra: dict[str, int],
    study: str | None = "momentum",
) -> str:
    """Return one line: variant, ranks, backend, transport, groups, learning rate, wire, memory.

    Args:
        options: the optimizer's.
        settings: the op's; as `path`, the transport, from `binding`.
        backend: "MPI" or "Gloo".
        wire: the dtypes on the wire.
        extra: bytes in addition to the optimizer's own, by "device" and "host".
        study: a key in `learning_rate.FIGURES`; None: there is no advice.
    """
    parts = [
        f"adasum_hvd: {options.op.name} "
        f"({'delta' if options.is_delta else 'gradient'} variant)",
        f"{options.process_set.size()} ranks on {backend}",
        f"exchange over {path or 'a transport that the first reduction chooses'}",
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


def distributed_banner(
    settings: Mapping[str, object],
    ranks: int,
    hosts: int,
    backends: str,
    wire: str,
    path: str,
    study: str | None,
) -> str:
    """Return one line for the engine on torch.distributed; `path` is what reduces."""
    rule, about = settings["rule"], ["no groups"]
    if rule == "adasum":
        rule = "adasum-grad"
        about = [_groups(settings), *_advice(ops.AdasumGrad, ranks, settings, study)]
    parts = [
        f"adasum_hvd {__version__} on torch.distributed: {rule} (gradient variant)",
        f"{_ranks_on(ranks, hosts)} over {backends}",
        *about,
        f"{wire} on the wire",
        path,
    ]
    return "; ".join(parts)


def _ranks_on(ranks: int, hosts: int) -> str:
    return f"{ranks} ranks on {hosts} {'host' if hosts == 1 else 'hosts'}"


def startup_line(
    settings: Mapping[str, object], backend: str, ranks: int, hosts: int, path: str
) -> str:
    """Return the line that `init` logs on rank 0; the path is "" before the first reduction.

    Example:
        >>> startup_line({"group_op": "adasum"}, "Gloo", 2, 1, "shared memory")
        '0.3.0: 2 ranks on 1 host over Gloo; exchange over shared memory; AdaSum all the way'
    """
    against = learning_rate.variant_advice(ops.AdasumDelta, ranks)
    parts = [
        f"{__version__}: {_ranks_on(ranks, hosts)} over {backend}",
        f"exchange over {path}" if path else "",
        _groups(settings),
        f"op=AdasumGrad: under momentum, AdasumDelta is {against}" if against else "",
    ]
    return "; ".join(filter(None, parts))


def _advice(
    op: ops.ReduceOp, ranks: int, settings: Mapping[str, object], study: str | None
) -> list[str]:
    """Return advice on the learning rate and the variant, if a study covers them."""
    group_op, group_size = str(settings["group_op"]), int(str(settings["group_size"]))
    if study is None or (group_op != "adasum" and group_size == 0):
        return []
    needed = {op} if group_op == "adasum" else {op, ops.parse(group_op)}
    if not all(map(learning_rate.FIGURES[study].covers, needed)):
        return []
    groups = group_op, max(1, group_size)
    rate = learning_rate.adasum_lr(1.0, op, ranks, *groups, optimizer=study)
    start = f"{study}: learning rate {rate.factor:.3g} times the best of one worker"
    against = learning_rate.variant_advice(op, ranks, study)
    return [f"{start} ({rate.certainty})", *([against] if against else [])]
