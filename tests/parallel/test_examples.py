"""Examples that no other test runs, and the table of all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from jobs import REPOSITORY

from adasum_hvd import cli
from tests.parallel.harness import elastic_example
from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import environment, run_launcher, torchrun
from tests.unit import pages

EXAMPLES = REPOSITORY / "examples"
LONGER = ("torch_fsdp.py", "torch_torchft.py")


def test_torch_elastic(tmp_path: Path) -> None:
    accuracy = elastic_example.run(tmp_path, "torch_elastic.py", "--epochs", "4")
    assert accuracy > 60


def test_torch_fsdp_resumes_on_another_number_of_shards(tmp_path: Path) -> None:
    words = [*torchrun(), "--standalone", "--nproc-per-node", "4"]
    words += ["--no-python", *python(), str(EXAMPLES / "torch_fsdp.py")]
    folder = str(tmp_path / "checkpoint")
    losses = []
    for arguments in (
        ["--shards", "2", "--steps", "3", "--save", folder],
        ["--shards", "4", "--steps", "1", "--resume", folder],
    ):
        status, output = run_launcher([*words, *arguments], environment(), 200)
        assert status == 0, output[-3000:]
        losses += re.findall(r"^step (\d+): loss (\S+) nats$", output, re.M)
    assert [step for step, _ in losses] == ["3", "4"]
    assert float(losses[1][1]) < float(losses[0][1]) < 5.6  # of 256 equal bytes 5.55


def test_first_run_page(tmp_path: Path) -> None:
    """Its second and third step, with a shorter training: the same lines and numbers by name."""
    page = REPOSITORY / "docs/first_run.md"
    starts = ("torchrun", "adasum-hvd ")
    blocks = [block for block in pages.blocks(page, "") if block.startswith(starts)]
    _, adasum, plot, advise = map(str.split, blocks)
    shown = re.search(r"^    (adasum_hvd .*\n(?:    .*\n)*)", page.read_text(), re.M)[1]
    words = [*torchrun(), "--standalone", *adasum[1:], "--epochs", "1"]
    program = words.index("examples/torch_ddp.py")
    words[program : program + 1] = [
        "--no-python",
        *python(),
        str(EXAMPLES / "torch_ddp.py"),
    ]
    words[words.index("run.jsonl")] = str(tmp_path / "run.jsonl")
    status, output = run_launcher(words, environment(), 200)
    assert status == 0, output[-3000:]
    for line in shown.splitlines():
        pattern = re.sub(r"\d[\d\\.]*", r"[\\d.]+", re.escape(line.strip()))
        assert re.search(pattern, output), (pattern, output)
    record = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    named = json.loads(re.search(r"^    (\{.*\})$", page.read_text(), re.M)[1])
    assert record["tensors"]["fc3.weight"].keys() == named.keys()
    for command in (plot, advise):
        given = [
            str(tmp_path / word) if word == "run.jsonl" else word for word in command
        ]
        assert cli.main(given[1:]) == 0
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_every_example_is_in_the_table_and_in_a_test() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for program in EXAMPLES.glob("*.py"):
        (row,) = re.findall(rf"^\| \[{program.name}\].*$", table, re.M)
        (test,) = re.findall(r"`(tests/\S+\.py)`", row)
        assert program.stem in (REPOSITORY / test).read_text(), program


def test_every_example_is_a_screen_or_two() -> None:
    for program in EXAMPLES.glob("*.py"):
        short = program.name in ("torch_digits.py", "torch_ddp.py")
        most = 88 if short else 120 if program.name in LONGER else 95
        assert len(program.read_text().splitlines()) <= most, program
