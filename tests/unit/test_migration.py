"""docs/mindspore.md and docs/migration.md: the names, paths and numbers in the column "here"."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import keras
import pytest

import adasum_hvd
import adasum_hvd.tensorflow.keras as keras_hvd
import adasum_hvd.torch as torch_hvd
from adasum_hvd import boost, distributed, mindspore_checkpoint, parallel
from adasum_hvd.mindspore import torch_checkpoint, wrap_cells
from adasum_hvd.parallel import context
from tests.unit import pages
from tests.unit.pages import REPOSITORY

PACKAGE = REPOSITORY / "adasum_hvd"
MINDSPORE = REPOSITORY / "docs/mindspore.md"
PUBLIC = (
    *(torch_hvd, keras_hvd, keras.optimizers, distributed, boost),
    *(torch_checkpoint, builtins),
)
MAKERS = (
    torch_hvd.DistributedOptimizer,
    torch_hvd.AdamOffload,
    torch_hvd.AdaSumByGradWrapCell,
    torch_hvd.init,
    mindspore_checkpoint.load,
)


def here() -> Iterator[str]:
    """Yield the names in backquotes of the tables' columns "here"."""
    for page in (MINDSPORE, REPOSITORY / "docs/migration.md"):
        for head, *rows in pages.tables(page):
            if "here" in head and head[0] != "recipe":
                for row in rows:
                    yield from re.findall(r"`([^`]*)`", row[head.index("here")])


NAMES = sorted(set(here()))


def found(name: str) -> Any:
    """Return a public object by its name, None where there is none."""
    last = name.split(".")[-1]
    if name.startswith("adasum_hvd."):
        module, _, attribute = name.rpartition(".")
        try:
            return importlib.import_module(name)
        except ImportError:
            return getattr(importlib.import_module(module), attribute)
    places = [vars(place) for place in PUBLIC]
    return next((place[last] for place in places if last in place), None)


def is_parameter(name: str) -> bool:
    return any(name in inspect.signature(maker).parameters for maker in MAKERS)


# Written as a user writes them, and not names of this project.
NOT_OURS = re.compile(
    r"weight|bias|fit|horovodrun|mpirun|torchrun|step\(\)|.*backward\(\)|register_comm_hook.*"
    r"|clone\(\)|optimizer\.synchronize\(\)|import .*|adasum-hvd exec|hvd\.(size|rank|join)\(\)"
)


@pytest.mark.parametrize("name", NAMES)
def test_names_exist(name: str) -> None:
    path, _, attribute = name.partition(": ")
    if NOT_OURS.fullmatch(name):
        return
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


def test_the_names_are_read() -> None:
    assert len(NAMES) > 50
    assert {"mindspore/wrap_cells.py: check_job", "relaxed=True"} <= set(NAMES)


def test_numbers_of_the_page_are_those_of_the_code() -> None:
    text = MINDSPORE.read_text()
    assert f"at least {context.MINDSPORE_MIN_DEVICES}, and a power of two" in text
    assert f"| {wrap_cells.MINDSPORE_GROUP_SIZE} by default; `relaxed=True`" in text
    assert f'{{"device_number": {boost.DEVICE_NUMBER}}}' in text
    for level, flags in boost.LEVELS.items():
        assert level in text and all(f"`{flag}`" in text for flag in flags)
    signature = inspect.signature(parallel.check).parameters
    shown = re.search(r"parallel\.check\(context, ([^)]*)\)", text)[1]
    for name, default in re.findall(r"(\w+)=(\w+)", shown):
        assert str(signature[name].default) == default


def test_docstrings_cite_pages_that_exist() -> None:
    cited = [
        (path, page)
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".h", ".cc", ".cu")
        for page in re.findall(r"docs/\w+\.md", path.read_text())
    ]
    assert len(cited) > 40 and adasum_hvd.__version__
    for path, page in cited:
        assert (REPOSITORY / page).exists(), (path, page)
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"SEEDS? (row|0)|[Ss]eeds? 00\d", path.read_text()), path
