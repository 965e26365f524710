"""docs/replaced.md against the package: who cites a row, and whether the names it gives exist."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from typing import Any

import keras
import pytest

import adasum_hvd.tensorflow.keras as keras_hvd
import adasum_hvd.torch as torch_hvd
from adasum_hvd import boost
from tests.unit import pages
from tests.unit.pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "replaced.md"
PACKAGE = REPOSITORY / "adasum_hvd"
HEADINGS = re.findall(r"^## (1[A-Z])\.", PAGE.read_text(), re.M)
# By row: what stands between backquotes in the column "here".
HERE = {
    row: re.findall(r"`([^`]*)`", " ".join(cells[2] for cells in table[1:]))
    for row, table in zip(HEADINGS, pages.tables(PAGE), strict=True)
}
NAMES = sorted({name for names in HERE.values() for name in names})
PUBLIC = (torch_hvd, keras_hvd, keras.optimizers, boost, boost.Boost, builtins)


def found(name: str) -> Any:
    """Return a public object by its name, None where there is none."""
    last = name.removeprefix("boost.")
    return next((vars(place)[last] for place in PUBLIC if last in vars(place)), None)


def is_parameter(name: str) -> bool:
    makers = (
        torch_hvd.DistributedOptimizer,
        torch_hvd.AdamOffload,
        torch_hvd.AdaSumByGradWrapCell,
    )
    return any(name in inspect.signature(maker).parameters for maker in makers)


def test_sources_cite_the_rows_that_name_them():
    cited = [
        (row, str(path.relative_to(PACKAGE)))
        for path in PACKAGE.rglob("*.py")
        for line in re.findall(r"SEEDS row.*", path.read_text())
        for row in re.findall(r"\b1[A-Z]\b", line)
    ]
    assert len(cited) > 15
    for row, path in cited:
        named = {name.split(":")[0] for name in HERE[row]}
        assert path in named, f"{path} cites row {row}, which does not name it"


@pytest.mark.parametrize("name", NAMES)
def test_names_exist(name):
    path, _, attribute = name.partition(": ")
    if re.fullmatch(r"[\w/]+(\.(py|cc|md)|/)", path):
        assert (PACKAGE / path).exists() or (REPOSITORY / path).exists()
        if attribute:
            module = path.removesuffix(".py").replace("/", ".")
            assert hasattr(importlib.import_module(f"adasum_hvd.{module}"), attribute)
    elif call := re.fullmatch(r"([\w.]+)\((.*)\)", name):
        parameters = inspect.signature(found(call[1])).parameters
        assert set(re.findall(r"(\w+)=", call[2])) <= parameters.keys()
    elif name.startswith("ADASUM_HVD_"):
        assert name.split("=")[0] in (REPOSITORY / "docs/settings.md").read_text()
    elif "=" in name:
        assert is_parameter(name.split("=")[0])
    else:
        assert found(name) is not None or is_parameter(name)
