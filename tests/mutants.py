"""Changes the package in one place at a time, and lists the changes that no test notices.

    python -m tests.mutants [COUNT [SEED [WORD ...]]]   # 200, 0, words of paths such as advice

A mutant is a copy of the repository with one operator, constant, condition or statement changed.
The room's tests run once without one (tests/tiers.py) and show which of them evaluate each
mutant's expression. Those run on it until one fails. Of C++, and of expressions outside functions,
it is all of the room's. Of C++ the core is built, and not the op in Horovod.
"""

from __future__ import annotations

import difflib
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from adasum_hvd.tools.jobs import output_of
from tests.mutations import Mutant, in_cpp, in_python
from tests.parallel.harness.launch import REPOSITORY, environment
from tests.tiers import ALL, QUICK, REST

SOURCES = (".py", ".cc", ".h", ".inc")
# Only `make gpu` and `make triton` run these.
ELSEWHERE = ("cuda.py", "device_slice.py", "triton_kernels.py")
COPY = REPOSITORY / "build" / "mutants"
UNIT, CASES = "tests/unit/test", "tests/parallel/cases"
# The rooms, each with its tests, the fast ones first.
ROOMS = {
    "adasum_hvd/advice": f"{UNIT}_advice.py {UNIT}_learning_rate.py {CASES}/torch/test_tools.py "
    f"{CASES}/distributed/test_hook.py",
    "adasum_hvd/core/__init__.py": f"{UNIT}_core.py {CASES}/distributed/test_all_reduce.py",
    "adasum_hvd/core": f"{UNIT}_core.py {UNIT}_native.py {CASES}/distributed/test_all_reduce.py",
    "adasum_hvd/offload": f"{UNIT}_adam_offload_*.py {CASES}/torch/test_adam_offload.py",
    "adasum_hvd/distributed": f"{UNIT}_distributed.py {UNIT}_thread_ranks.py {CASES}/distributed",
    "adasum_hvd/torch/optimizer": f"{CASES}/torch",
    "adasum_hvd/tensorflow/optimizer": f"{CASES}/keras {CASES}/tensorflow",
}  # fmt: skip


def seen_by(number: int | str) -> Path:
    """Return the folder that has one of each test that evaluates a mutant's expression."""
    return COPY / "build" / "seen" / str(number)


SAW = (
    f'(__import__("os").makedirs("{seen_by("%d")}/" + __import__("os").environ.get('
    '"PYTEST_CURRENT_TEST", "").split("[")[0].split(" ")[0], exist_ok=True) or ('
)


def known(words: tuple[str, ...]) -> Iterator[Mutant]:
    """Yield the mutants of the rooms whose paths have these words."""
    for path in (p for room in ROOMS for p in sorted(Path(room).rglob("*"))):
        if path.suffix not in SOURCES or path.name in ELSEWHERE:
            continue
        if all(word in str(path) for word in words):
            of = in_python if path.suffix == ".py" else in_cpp
            yield from of(str(path), path.read_bytes())


def run(tests: list[str], seconds: float, core: bool = False) -> tuple[str, set[str]]:
    """Build the core if asked to, run tests in the copy; return the result and what failed."""
    words = [sys.executable, "-m", "pytest", "-q", *tests]
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    more = {
        "ADASUM_HVD_REQUIRE_CORE": "1",
        "PYTHONPATH": "",
        "ADASUM_CASE_SECONDS": "60",
    }
    for command in [build] * core + [words]:
        status, shown = output_of(command, environment() | more, seconds, COPY)
        failed = set(re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", shown, re.M))
        if status and not failed:
            return (
                "late" if "\nended after" in shown else f"broken: {shown[-999:]}",
                failed,
            )
    return "killed" if failed else "survived", failed


def mark(mutants: dict[int, Mutant]) -> None:
    """Let the copy's expressions leave a folder of the test that evaluates them."""
    marks: dict[str, list[tuple[int, bytes]]] = {}
    for number, mutant in mutants.items():
        if mutant.expression:
            begin, end = mutant.expression
            own = (begin, (SAW % number).encode()), (end, b"))")
            marks.setdefault(mutant.path, []).extend(own)
    for path, of in marks.items():
        source = Path(path).read_bytes()
        for place, text in sorted(of, reverse=True):
            source = source[:place] + text + source[place:]
        (COPY / path).write_bytes(source)


def tests_of(
    room: str, mutants: dict[int, Mutant]
) -> tuple[dict[int, list[str]], float]:
    """Return which tests may notice each mutant of a room, and a limit of their seconds."""
    whole = [
        str(p.relative_to(COPY)) for w in ROOMS[room].split() for p in COPY.glob(w)
    ]
    began, failed, tiers = time.monotonic(), set[str](), {}
    mark(mutants)
    for tier in QUICK, REST:
        unseen = {
            n for n, m in mutants.items() if m.expression and not seen_by(n).exists()
        }
        if tier == QUICK or unseen:
            result, fails = run([f"--tier={tier}", *whole], 3600)
            if result not in ("killed", "survived"):
                sys.exit(f"{room}: expected tests that run, but got {result}")
            failed |= fails
            tiers |= dict.fromkeys(unseen, f"--tier={ALL if tier == REST else QUICK}")
    print(
        f"{room}: fail without a mutant, and are left out: {failed or 'none'}",
        flush=True,
    )
    found = {}
    for number, mutant in mutants.items():
        shutil.copy(mutant.path, COPY / mutant.path)
        tests = {
            str(p.relative_to(seen_by(number))) for p in seen_by(number).rglob("*::*")
        }
        chosen = [*sorted(tests - failed)]
        if not mutant.expression or (
            seen_by(number).exists() and not tests
        ):  # at imports
            chosen = [f"--deselect={test}" for test in failed] + whole
        tier = tiers.get(number, f"--tier={QUICK}")
        found[number] = ["-x", tier, *chosen] if chosen else []
    return found, 60 + 2 * (time.monotonic() - began)


def room_of(path: str) -> str:
    """Return the first room that has a file."""
    return next(room for room in ROOMS if path.startswith(room))


def main(count: str = "200", seed: str = "0", *words: str) -> None:
    """Print the diffs of survivors, then killed and survived by file."""
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(
        ".", COPY, ignore=lambda at, _: {".git", ".venv", "build"} if at == "." else ()
    )
    found = list(known(words))
    sample = random.Random(seed).sample(found, min(int(count), len(found)))
    numbered = dict(enumerate(sorted(sample, key=lambda mutant: mutant[:3]), 1))
    counts: Counter[tuple[str, str]] = Counter()
    for room in ROOMS:
        own = {n: m for n, m in numbered.items() if room_of(m.path) == room}
        tests, limit = tests_of(room, own) if own else ({}, 0)
        for number, (path, begin, end, text, _) in own.items():
            source = Path(path).read_bytes()
            changed = source[:begin] + text + source[end:]
            (COPY / path).write_bytes(changed)
            result, failed = "survived", set()
            if tests[number]:
                result, failed = run(tests[number], limit, not path.endswith(".py"))
            (COPY / path).write_bytes(source)
            counts[path, result.partition(":")[0]] += 1
            print(
                f"{number}/{len(sample)} {result} by {failed or tests[number]}",
                flush=True,
            )
            if result != "killed":
                old, new = (whole.decode().splitlines() for whole in (source, changed))
                print(*difflib.unified_diff(old, new, path, lineterm="", n=1), sep="\n")
    for (path, result), number in sorted(counts.items()):
        print(f"| {path} | {result} | {number} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
