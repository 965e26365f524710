"""Examples that no other test runs, and the table of all of them."""

from __future__ import annotations

import re
from pathlib import Path

from jobs import REPOSITORY

from tests.parallel.harness import elastic_example

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


def test_every_example_is_a_screen_or_two() -> None:
    for program in EXAMPLES.glob("*.py"):
        most = 75 if program.name in ("torch_digits.py", "torch_ddp.py") else 95
        assert len(program.read_text().splitlines()) <= most, program
