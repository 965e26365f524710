"""The page of the trial of optimizers, from its JSON.

python benchmarks/optimizer_page.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs/optimizers.md"
_WAYS = ("reduce_changes", "LocalSGD", "AdasumGrad", "AdasumDelta")
# What a refusal means, and what to use instead.
_RULES = {
    "keeps a copy of the weights": (
        "its steps compute weights from tensors that no reduction reaches, or `eval()` exchanges "
        "weights with them",
        "a gradient variant: `AdasumGrad`, `adasum_hook`",
    ),
    "keeps an average of the weights": (
        "its state has the weights a second time, as its result, where no reduction reaches them",
        "a gradient variant",
    ),
    "differentiates gradients": (
        "a reduced gradient has values, but no graph",
        "the delta variant",
    ),
    "takes sparse gradients": (
        "AdaSum reduces dense gradients",
        "`sparse_as_dense=True`, or the delta variant",
    ),
    "is no torch.optim.Optimizer": (
        "it has no step hooks and no param groups of torch's",
        "the optimizer inside it",
    ),
    "has a collective step": (
        "its ranks send each other weights, gradients or updates",
        "another optimizer, or `adasum_hook`",
    ),
}
_HEAD = """# Optimizers

Which optimizers train right with AdaSum? This page is the result of
`python benchmarks/optimizers.py`, which tries every optimizer of {packages} packages that runs on a
CPU. Of {count} optimizers, {right} are right in all four ways. {refused} more are refused in some
or all ways, with a reason, and right in the others. {wrong} are in neither group.

The ways are `reduce_changes` and `LocalSGD` (windows of two steps) of
[`adasum_hvd.distributed`](distributed.md), and `AdasumGrad` and `AdasumDelta` of
[`adasum_hvd.torch.DistributedOptimizer`](torch.md). Each optimizer has its defaults and trains a
model of two layers for eight steps on two ranks. Right means all of this:

- The same data on both ranks gives the weights of plain training.
- Different data gives the weights of a simulation in one process. It joins gradients or changes by
  `adasum_hvd.reference`.
- After four steps, a new optimizer goes on from `state_dict()` as the simulation does.
- `eval()` and `train()` give the simulation's weights (`AdasumGrad`).
- Both ranks have the same bits.
- Ways that reduce changes: at least half of a change of the weights is left after the next step.
  Otherwise the optimizer undoes the reduction.

Weights may differ by 1/1000 of the largest change, and by {roundings} roundings. Some optimizers
amplify roundings. Their limit is ten times the effect of noise of 1e-6 in the simulation.
Compilation is off (`TORCHDYNAMO_DISABLE=1`). Date: {date}. Packages:

{versions}.
"""


def encoded(found: Any) -> str:
    """Return the results as JSON, a line for each optimizer."""
    rows = ",\n".join(json.dumps(row, sort_keys=True) for row in found["rows"])
    head = json.dumps({key: found[key] for key in ("date", "versions", "roundings")})
    return f'{head[:-1]}, "rows": [\n{rows}\n]}}\n'


def page(found: Any) -> str:
    """Return the page."""
    rows = [row for row in found["rows"] if "ways" in row]
    fine = [row for row in rows if all(map(_is_fine, _verdicts(row)))]
    right = [row for row in rows if set(_verdicts(row)) == {"right"}]
    versions = ", ".join(f"{name} {of}" for name, of in found["versions"].items())
    head = _HEAD.format(
        packages=len(found["versions"]),
        count=len(rows),
        right=len(right),
        refused=len(fine) - len(right),
        wrong=len(rows) - len(fine),
        roundings=found["roundings"],
        date=found["date"],
        versions=versions,
    )
    sections = [
        head,
        "## Right, refused, wrong\n",
        _table(_totals(found, rows)),
        "## Refusals\n",
        "All ranks raise the same error. The delta ways are `reduce_changes`, `LocalSGD` and\n"
        "`AdasumDelta`.\n",
        _table(_refusals(rows)),
        "## Not right\n",
        _table(_not_right(rows)) if len(rows) > len(fine) else "None.\n",
        "## What a step keeps of a reduction\n",
        "These are right in the delta ways, but a step takes back a part of the last\n"
        "reduction. It normalizes or decays weights, or moves them towards earlier ones of\n"
        "its rank. The table has the least part that a step has kept, if it is at most 0.95.\n",
        _table(_partly_kept(rows)),
        "## Not tried\n",
        "Plain training does not run with these here, on one process.\n",
        _table(_not_tried(found["rows"])),
    ]
    return "\n".join(sections)


def _verdicts(row: Any) -> list[str]:
    return [_verdict(row["ways"][way]) for way in _WAYS]


def _verdict(found: Any) -> str:
    return found if isinstance(found, str) else found["verdict"]


def _is_fine(verdict: str) -> bool:
    return verdict == "right" or verdict.startswith("refused: ")


def _table(rows: Iterator[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines.insert(1, "|---" * (lines[0].count("|") - 1) + "|")
    return "\n".join(lines) + "\n"


def _totals(found: Any, rows: Sequence[Any]) -> Iterator[Sequence[object]]:
    yield ("right, refused, wrong", "optimizers", *(f"`{way}`" for way in _WAYS))
    for package in (*found["versions"], ""):
        own = [row for row in rows if package in ("", row["package"])]
        cells = []
        for verdicts in zip(*map(_verdicts, own), strict=True):
            right = verdicts.count("right")
            refused = sum(map(_is_fine, verdicts)) - right
            cells.append(f"{right}, {refused}, {len(own) - right - refused}")
        yield (package or "all", len(own), *cells)


def _refusals(rows: Sequence[Any]) -> Iterator[Sequence[object]]:
    yield ("the optimizer", "why it is refused", "use", "by", "which")
    for rule, (reason, remedy) in _RULES.items():
        by: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            verdicts = zip(_WAYS, _verdicts(row), strict=True)
            ways = tuple(way for way, one in verdicts if one == f"refused: {rule}")
            if ways:
                by.setdefault(ways, []).append(_name(row))
        for ways, names in by.items():
            listed = ", ".join(f"`{way}`" for way in ways)
            yield (rule, reason, remedy, listed, ", ".join(names))


def _not_right(rows: Sequence[Any]) -> Iterator[Sequence[object]]:
    yield ("optimizer", "way", "finding", "how far", "of a change, the next step keeps")
    for row in rows:
        for way in _WAYS:
            one = row["ways"][way]
            if not isinstance(one, str):
                parts = one.get("parts", {})
                far = ", ".join(f"{n}: {v}" for n, v in parts.items() if v > 1)
                detail = far or one.get("error", "").partition(";")[0].replace(
                    "|", "\\|"
                )
                yield (_name(row), f"`{way}`", one["verdict"], detail, row["keeps"])


def _partly_kept(rows: Sequence[Any]) -> Iterator[Sequence[object]]:
    yield ("part", "optimizers")
    by: dict[float, list[str]] = {}
    for row in rows:
        if row["keeps"] <= 0.95 and row["ways"]["reduce_changes"] == "right":
            by.setdefault(row["keeps"], []).append(_name(row))
    for part, names in sorted(by.items()):
        yield (part, ", ".join(names))


def _not_tried(rows: Sequence[Any]) -> Iterator[Sequence[object]]:
    yield ("reason", "optimizers")
    by: dict[str, list[str]] = {}
    for row in rows:
        if "ways" not in row:
            by.setdefault(row["error"], []).append(_name(row))
    for reason, names in by.items():
        yield (f"`{reason}`", ", ".join(names))


def _name(row: Any) -> str:
    return f"{row['package']} `{row['name']}`"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(json.loads(PAGE.with_suffix(".json").read_text())))


if __name__ == "__main__":
    main()
