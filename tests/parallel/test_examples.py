"""Examples that no other test runs, and the table of all of them."""

from __future__ import annotations

import re
from pathlib import Path

import elastic_example
from jobs import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


def test_torch_elastic(tmp_path: Path) -> None:
    accuracy = elastic_example.run(tmp_path, "torch_elastic.py", "--epochs", "4")
    assert accuracy > 60


def test_every_example_is_in_the_table_and_in_a_test() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for program in EXAMPLES.glob("*.py"):
        (row,) = re.findall(rf"^\| \[{program.name}\].*$", table, re.M)
        (test,) = re.findall(r"`(tests/\S+\.py)`", row)
        assert program.stem in (REPOSITORY / test).read_text(), program


def test_the_first_examples_are_one_screen() -> None:
    for name, most in (("torch_digits", 70), ("keras_digits", 110), ("torch_ddp", 110)):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most, name
