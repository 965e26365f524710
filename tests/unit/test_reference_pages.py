"""The reference's tables against the code: options, arguments, variables, defaults, ranges."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import adasum_hvd.tensorflow as tensorflow_hvd
import adasum_hvd.torch as torch_hvd
from adasum_hvd import cli
from adasum_hvd.base import options
from adasum_hvd.horovod.build import sources
from adasum_hvd.horovod.launch.variables import START_TIMEOUT_SECONDS
from tests.unit import pages
from tests.unit.pages import REPOSITORY

DOCS = REPOSITORY / "docs"
MARK = r"`([^`]+)`"


# ---- docs/command_line.md ----


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (
        a
        for a in cli.make_parser()._actions
        if isinstance(a, argparse._SubParsersAction)
    )
    return dict(action.choices)


def sections() -> dict[str, str]:
    text = (DOCS / "command_line.md").read_text()
    return dict(
        re.findall(r"^## `adasum-hvd ([\w-]+)`\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    )


def test_every_command_has_a_section() -> None:
    assert sections().keys() == subparsers().keys()


def rows_of(section: str) -> Iterator[tuple[list[str], str]]:
    """Yield names and default of each row of the options' table."""
    for line in section.partition("| option |")[2].splitlines()[2:]:
        if not line.startswith("|"):
            return
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        yield [name.split()[0] for name in re.findall(MARK, cells[0])], cells[1]


@pytest.mark.parametrize("command", sorted(subparsers()))
def test_every_option_is_in_the_table_with_its_default(command: str) -> None:
    listed = {
        name: default
        for names, default in rows_of(sections()[command])
        for name in names
    }
    known = set()
    for action in subparsers()[command]._actions:
        if isinstance(action, argparse._HelpAction) or action.dest == "compare":
            continue
        names = action.option_strings or [action.metavar or action.dest]
        known |= set(names)
        for name in names:
            assert name in listed, (command, name)
        if isinstance(action.default, int | float) and not isinstance(
            action.default, bool
        ):
            assert listed[names[0]] == f"{action.default:g}", (command, names)
    assert listed.keys() == known


# ---- docs/arguments.md ----


def argument_rows() -> dict[str, list[str]]:
    ((_, *rows),) = pages.tables(DOCS / "arguments.md")
    return {re.search(MARK, row[0])[1]: row[1:] for row in rows}


def shown(default: object) -> str:
    """Return a default as the table shows it."""
    if default == "":
        return '""'
    if isinstance(default, str):
        return f'"{default}"'
    if isinstance(default, type):
        return {"NoneCompressor": "Compression.none"}[default.__name__]
    if hasattr(default, "process_set_id"):
        return "global_process_set"
    return getattr(default, "name", None) or repr(default)


@pytest.mark.parametrize("column, hvd", [(0, torch_hvd), (1, tensorflow_hvd)])
def test_arguments_of_the_optimizer_have_these_defaults(
    column: int, hvd: object
) -> None:
    rows = argument_rows()
    parameters = dict(inspect.signature(hvd.DistributedOptimizer).parameters)
    del parameters["optimizer"]
    listed = {name for name, cells in rows.items() if cells[column]}
    assert listed == parameters.keys()
    for name, parameter in parameters.items():
        assert rows[name][column] == f"`{shown(parameter.default)}`", name


def test_arguments_of_one_variant_are_marked() -> None:
    rows = argument_rows()
    for name in ("local_steps", "clip_delta_norm"):
        assert "delta variant only" in rows[name][2]
        with pytest.raises(ValueError, match="expected op=AdasumDelta"):
            given = {name: 2, "op": torch_hvd.AdasumGrad, "compression": None}
            options.check(options.Options(process_set=None, **given), [None])
    assert set(options.SHARED) <= rows.keys()


# ---- docs/settings.md ----


def variables() -> dict[str, list[str]]:
    """Return the cells after the name, by variable, of all tables."""
    tables = pages.tables(DOCS / "settings.md")
    return {re.search(MARK, row[0])[1]: row[1:] for _, *rows in tables for row in rows}


READ = """
import json, os, sys
from adasum_hvd.horovod import binding
from adasum_hvd.torch.ops import LIBRARY
errors = {}
for name, value in json.load(sys.stdin):
    os.environ[name] = value
    errors[f"{name}={value}"] = binding.settings_error(LIBRARY)
    del os.environ[name]
print(json.dumps([binding.settings(LIBRARY), errors]))
"""
# A table's row and a field of the op's settings.
FIELDS = {
    "ADASUM_HVD_OP": "op",
    "ADASUM_HVD_GROUP_OP": "group_op",
    "ADASUM_HVD_GROUP_SIZE": "group_size",
    "ADASUM_HVD_RADICES": "radices",
    "ADASUM_HVD_LOCAL": "local",
    "ADASUM_HVD_TIMEOUT_SECONDS": "timeout_seconds",
    "ADASUM_HVD_STALL_SECONDS": "stall_seconds",
    "ADASUM_HVD_CHECKPOINT_SECONDS": "checkpoint_seconds",
}


def edges() -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest value of each integer variable."""
    found = {}
    for name, cells in variables().items():
        if limits := re.fullmatch(r"integer from (\d+) to (\S+)", cells[0]):
            high = 2**30 if limits[2] == "2^30" else int(limits[2])
            found[name] = int(limits[1]), high
    return found


@pytest.fixture(scope="module")
def op() -> tuple[dict[str, object], dict[str, str]]:
    """Return the op's defaults, and its error for each value next to the edge of a range."""
    tried = [
        (name, str(value))
        for name, (low, high) in edges().items()
        for value in (low - 1, low, high, high + 1)
    ]
    for name, cells in variables().items():
        tried += [(name, word) for word in re.findall(MARK, cells[0])]
        tried.append((name, "nonsense"))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ADASUM_HVD_")}
    ran = subprocess.run(
        [sys.executable, "-c", READ], input=json.dumps(tried),
        env=clean, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return tuple(json.loads(ran.stdout.splitlines()[-1]))


def test_defaults_are_those_of_the_op(op) -> None:
    settings, _ = op
    for name, field in FIELDS.items():
        assert variables()[name][1].strip("`") == str(settings[field]), name


def test_ranges_are_those_of_the_op(op) -> None:
    _, errors = op
    assert len(edges()) == 5
    for name, (low, high) in edges().items():
        for value, valid in ((low - 1, 0), (low, 1), (high, 1), (high + 1, 0)):
            assert bool(errors[f"{name}={value}"]) != bool(valid), (name, value)


def test_words_of_the_table_are_accepted_and_others_are_not(op) -> None:
    _, errors = op
    for name in (
        "ADASUM_HVD_OP",
        "ADASUM_HVD_GROUP_OP",
        "ADASUM_HVD_RADICES",
        "ADASUM_HVD_LOCAL",
    ):
        words = re.findall(MARK, variables()[name][0])
        assert len(words) >= 2 and not any(errors[f"{name}={word}"] for word in words)
        assert errors[f"{name}=nonsense"]


def test_variables_that_all_ranks_share_are_those_that_the_op_compares() -> None:
    source = (REPOSITORY / "adasum_hvd/horovod/op/settings.cc").read_text()
    fingerprint = source.partition("Settings::Fingerprint() const {")[2].partition(
        "return"
    )[0]
    compared = {
        "ADASUM_HVD_OP": "off", "ADASUM_HVD_GROUP_OP": "group_op",
        "ADASUM_HVD_GROUP_SIZE": "group_size", "ADASUM_HVD_RADICES": "radices",
        "ADASUM_HVD_NUM_THREADS": "threads", "ADASUM_HVD_LOCAL": "local.mode",
        "ADASUM_HVD_TIMEOUT_SECONDS": "timeout_seconds",
        "ADASUM_HVD_STALL_SECONDS": "stall_seconds",
        "ADASUM_HVD_CHECKPOINT_SECONDS": "checkpoint_seconds",
    }  # fmt: skip
    code = re.sub(r"//.*", "", fingerprint)
    for name, member in compared.items():
        in_code = bool(re.search(rf"\b{re.escape(member)}\b", code))
        assert variables()[name][2] == ("all" if in_code else "each"), name


def test_every_variable_of_the_code_is_on_a_page() -> None:
    listed = (DOCS / "settings.md").read_text() + (
        REPOSITORY / "CONTRIBUTING.md"
    ).read_text()
    package = REPOSITORY / "adasum_hvd"
    files = [p for p in package.rglob("*") if p.suffix in (".py", ".cc", ".h")]
    named = {
        name
        for p in files
        for name in re.findall(r'"(ADASUM_HVD_[A-Z_]+)"', p.read_text())
    }
    assert len(named) > 10
    assert not [name for name in sorted(named) if f"`{name}`" not in listed]


def test_defaults_of_horovod_are_those_of_its_sources() -> None:
    rows = variables()
    assert (
        f"{START_TIMEOUT_SECONDS:g} for `hvd.init()`"
        in rows["HOROVOD_START_TIMEOUT"][1]
    )
    assert rows["ADASUM_HVD_CACHE"][0].startswith("`~/.cache/adasum_hvd`")
    assert sources.cache_dir().name == "adasum_hvd" or "ADASUM_HVD_CACHE" in os.environ


def test_examples_set_the_variable_of_their_row() -> None:
    for name, cells in variables().items():
        assert re.search(rf"`{name.replace('*', 'WITHOUT_MPI')}=\S+`", cells[-1]), name
