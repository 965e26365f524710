"""The pages quote the convergence study's figures and follow the rule derived from them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from adasum_hvd.advice.learning_rate import FIGURES
from adasum_hvd.base import ops
from tests.unit import pages
from tests.unit.pages import REPOSITORY
from tests.unit.study_results import at_the_end

OPS = (ops.Sum, ops.Average, ops.AdasumGrad, ops.AdasumDelta)
HEAD = [op.name for op in OPS]
QUOTING = [REPOSITORY / "docs/convergence.md"]
# Entry pages: their first optimizer must use the variant of the rule.
BEGINNINGS = [
    REPOSITORY / name
    for name in ("README.md", "docs/index.md", "docs/tensorflow.md", "docs/parallel.md")
]


def cell(op: ops.ReduceOp, workers: int, *, tuned: bool) -> str:
    """Return the cell of study 2's tables for a reduction."""
    kind = "own" if tuned else "sequential"
    factor, mean, deviation = at_the_end("momentum", kind, op, workers)
    return f"{mean} +- {deviation}" + f" ({factor:g}x)" * tuned


@pytest.mark.parametrize("page", QUOTING, ids=lambda path: path.name)
def test_tables_are_the_measured_ones(page: Path) -> None:
    """Every row of every table with these columns; both rates, bad rows included."""
    seen = set()
    for head, *rows in pages.tables(page):
        if head[-4:] != HEAD or head[0] != "workers":
            continue
        for row in rows:
            tuned = any("x)" in cell for cell in row)
            workers = int(row[0])
            assert row[-4:] == [cell(op, workers, tuned=tuned) for op in OPS], row
            seen.add((workers, tuned))
    assert seen >= {(n, tuned) for n in (16, 32, 64) for tuned in (False, True)}


def test_the_claim_is_measured() -> None:
    """README's table has the rows of study 7's tables, and its text the figure of one worker."""
    tables = REPOSITORY / "docs/convergence/tables.md"
    digits, *_ = (
        rows
        for head, *rows in pages.tables(tables)
        if head[1:4] == ["method", "rate, over one worker's", "steps to target"]
    )
    measured = {
        (row[0], row[1]): row
        for row in digits
        if len(row) == 7 and row[2].startswith(tuple("0123456789"))
    }
    longer, *_ = (  # Average's runs that may take more steps
        {row[0]: row[2] for row in rows}
        for head, *rows in pages.tables(tables)
        if head == ["workers", "most steps", "steps to target"]
    )
    readme = REPOSITORY / "README.md"
    (shown,) = (rows for rows in pages.tables(readme) if rows[0][0] == "32 workers")
    names = {
        "Average": "average", "AdasumGrad": "adasum-grad",
        "AdaScale": "adascale", "AdasumDelta": "adasum-delta",
        "LARS with Average": "LARS, average",
    }  # fmt: skip
    assert {row[0] for row in shown[1:]} == names.keys()
    for name, unscaled, tuned in shown[1:]:
        row = measured["32", names[name]]
        assert unscaled == (longer["32"] if name == "Average" else row[5])
        assert tuned == f"{row[3]} ({row[2].split()[0]})"
    assert f"One worker takes {measured['1', 'all'][3]} steps" in readme.read_text()


def reductions(page: Path) -> list[str]:
    """Return the `op=` of every optimizer in the page's blocks, in order."""
    return [
        ast.unparse(keyword.value)
        for block in pages.blocks(page, "python")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "hvd.DistributedOptimizer"
        for keyword in node.keywords
        if keyword.arg == "op" and ast.unparse(keyword.value) != "..."
    ]


@pytest.mark.parametrize("page", BEGINNINGS, ids=lambda path: path.name)
def test_snippets_follow_the_rule(page: Path) -> None:
    rows = FIGURES["momentum"].rows
    best = min(
        (ops.AdasumGrad, ops.AdasumDelta),
        key=lambda op: FIGURES["momentum"].best(rows[op][-1]).result,
    )
    assert reductions(page)[0] == f"hvd.{best.name}"


@pytest.mark.parametrize(
    "name", ["torch_digits", "keras_digits", "tensorflow2_custom_loop"]
)
def test_examples_follow_the_rule(name: str) -> None:
    tree = ast.parse((REPOSITORY / f"examples/{name}.py").read_text())
    (default,) = (
        ast.literal_eval(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.args
        and ast.unparse(node.args[0]) == "'--op'"
        for keyword in node.keywords
        if keyword.arg == "default"
    )
    assert ops.parse(default) is ops.AdasumGrad
