"""How the tests of ranks are collected, and how `make test` shows its parts."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import parts
from tests.parallel.harness import cases, configurations, faults, launch
from tests.parallel.harness.worker import run

FILE = """
import pytest
from tests.parallel.harness.torch_training import VARIANTS
SIZES = (1, 2)

def case_plain() -> None: ...

@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "steps"), [("a", 1), ("b", 2)], ids=["one", "two"])
def case_of_two_marks(size, op, steps) -> None: ...

@pytest.mark.parametrize("op", VARIANTS)
def case_of_an_imported_name(op) -> None: ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cases").mkdir()
    harness = tmp_path / "harness"
    harness.mkdir()
    (harness / "torch_training.py").write_text('VARIANTS = ("x", "y")')
    monkeypatch.setattr(cases, "FOLDER", tmp_path / "cases")
    monkeypatch.setattr(cases, "cases_in", cases.cases_in.__wrapped__)
    return tmp_path / "cases"


def test_cases_are_read_with_their_parameters(folder: Path) -> None:
    (folder / "test_some.py").write_text(FILE)
    found = cases.cases_in("test_some")
    assert [case.name for case in found] == [
        "case_plain",
        *(f"case_of_two_marks[{id_}]" for id_ in ("one-1", "one-2", "two-1", "two-2")),
        "case_of_an_imported_name[x]",
        "case_of_an_imported_name[y]",
    ]
    assert found[1].arguments == {"op": "a", "steps": 1, "size": 1}
    returned = run(lambda size, op, steps: [size, op, steps], found[4])
    assert returned["result"] == [2, "b", 2] and not returned["error"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '@pytest.mark.parametrize("x", [f()])\ndef case_a(x): ...',
            r"expected literals as parameters of a case, but got \[f\(\)\]",
        ),
        ("def case_a(): ...\ndef case_a(): ...", "got twice {'case_a'}"),
    ],
)
def test_cases_that_cannot_be_read(folder: Path, text: str, message: str) -> None:
    (folder / "test_some.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        cases.cases_in("test_some")


def test_every_file_of_cases_has_ranks_that_run_it() -> None:
    """`make soak` runs the files that no shared configuration does."""
    shared = {file for one in configurations.CONFIGURATIONS for file in one.files}
    found = {cases.file_of(path) for path in cases.FOLDER.rglob("test_*.py")}
    assert found - shared == {
        "torch.test_sixteen",
        "torch.test_soak",
        "torch.test_strict_sum",
    }
    ids = [str(one) for one in configurations.CONFIGURATIONS]
    assert len(set(ids)) == len(ids)


def test_parts_show_how_far_they_are_and_fail(tmp_path: Path) -> None:
    """Two parts side by side: lines while they run, pytest's output and the status at the end."""
    (tmp_path / "test_one.py").write_text("def test_a(): pass\ndef test_b(): pass")
    (tmp_path / "test_two.py").write_text(
        "import time\ndef test_c():\n    time.sleep(2)\n    assert False"
    )
    script = (
        "import sys; from tests import parts\nparts.PLAIN_SECONDS = 0\n"
        f"parts.PARTS = {{n: [f'{tmp_path}/test_{{n}}.py'] for n in ('one', 'two')}}\n"
        f"parts.KEPT = parts.Path('{tmp_path}/kept')\n"
        "sys.exit(parts.main(['one', 'two']))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(parts.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 1, shown.stderr
    assert "two 0/1 " in shown.stdout
    assert "2 passed in" in shown.stdout and "1 failed in" in shown.stdout
    assert "run 3 of 3\n" in shown.stdout
    assert shown.stdout.endswith(f"output: {tmp_path}/kept\nfailed: two\n")
    assert "assert False" in (tmp_path / "kept" / "two.log").read_text()


def test_a_second_run_leaves_the_output_of_the_first(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(parts, "KEPT", tmp_path / "kept")
    parts.KEPT.mkdir()
    (parts.KEPT / "unit.log").write_text("of the first")
    with (tmp_path / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert parts.main(["unit", "cases"]) == 1
    assert (parts.KEPT / "unit.log").read_text() == "of the first"


def collected(tier: str) -> list[str]:
    """Return the names of a tier's tests among those that run in several ways."""
    places = ["tests/parallel/cases", "tests/parallel/test_faults.py"]
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", *places, "--collect-only", "--tier", tier]
        + ["-q", "-o", "addopts="],
        cwd=Path(parts.__file__).parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in shown.stdout.splitlines() if "::" in line]


def test_make_test_runs_each_case_once_and_make_check_all_of_them() -> None:
    quick, rest = collected("quick"), collected("rest")
    known = [case for one in configurations.CONFIGURATIONS for case in one.cases]
    ways = [name for name in (*quick, *rest) if "/cases/" in name]
    assert len(set(ways)) == len(ways) == len(known)
    once = [name for name in quick if "/cases/" in name]
    assert len(once) == len(set(known)) < len(ways) / 2
    kinds = [name for name in quick if "test_faults" in name]
    assert len(kinds) == len(faults.FAULTS)
    # The core reduces there, and torch only in its own cases.
    by_torch = [name for name in once if "core=off" in name]
    assert all("distributed/test_levels.py" in name for name in by_torch)


def test_processors_are_divided_by_process_while_the_parts_run(tmp_path: Path):
    switch = tmp_path / "sched_autogroup_enabled"
    with pytest.raises(OSError, match="of the body"), parts.divided_by_process(switch):
        assert not switch.exists(), "no such switch here"
        raise OSError("of the body")
    switch.write_text("1\n")
    with pytest.raises(SystemExit), parts.divided_by_process(switch):
        assert switch.read_text() == "0\n"
        sys.exit(1)
    assert switch.read_text() == "1\n"


def test_ranks_find_the_packages_of_the_tests(monkeypatch) -> None:
    """Such as the Keras of `make matrix`; once, also in launches by ranks."""
    monkeypatch.setenv("PYTHONPATH", "/of/tests")
    found = launch.environment()["PYTHONPATH"]
    assert found.split(os.pathsep)[-1] == "/of/tests"
    monkeypatch.setenv("PYTHONPATH", found)
    assert launch.environment()["PYTHONPATH"] == found
