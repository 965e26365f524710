"""Changes the package in one place at a time, and lists the changes that no test notices.

    python -m tests.mutants [COUNT [SEED [WORD ...]]]   # 200, 0, words of paths such as advice

A mutant is a copy of the repository with one operator, constant, condition or statement changed.
The tests of its room run on it, each once (tests/tiers.py), until one fails. Of C++ the core is
built, and not the op in Horovod.
"""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import random
import re
import shutil
import sys
import time
from collections import Counter, namedtuple
from collections.abc import Iterator
from pathlib import Path

from adasum_hvd.tools.jobs import output_of
from tests.parallel.harness.launch import REPOSITORY, environment

SOURCES = (".py", ".cc", ".h", ".inc")
COPY = REPOSITORY / "build" / "mutants"
UNIT, CASES = "tests/unit/test", "tests/parallel/cases"
# The rooms, each with its tests, the fast ones first.
ROOMS = {
    "adasum_hvd/advice": " ".join(f"{UNIT}_{n}.py" for n in ("advice", "learning_rate", "tools")),
    "adasum_hvd/core": f"{UNIT}_core.py {UNIT}_native.py {CASES}/distributed/test_all_reduce.py",
    "adasum_hvd/offload": f"{UNIT}_adam_offload_*.py {CASES}/torch/test_adam_offload.py",
    "adasum_hvd/distributed": f"{UNIT}_distributed.py {CASES}/distributed",
    "adasum_hvd/torch/optimizer": f"{CASES}/torch",
    "adasum_hvd/tensorflow/optimizer": f"{CASES}/keras {CASES}/tensorflow",
}  # fmt: skip
SWAPS = {
    "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+",
    "*": "+", "/": "*", "//": "*", "and": "or", "or": "and", "is not": "is", "is": "is not",
    "not in": "in", "in": "not in", "&&": "||", "||": "&&", "true": "false", "false": "true",
}  # fmt: skip
IN_PYTHON = re.compile(rb"not in|is not|[a-z]+|[^\s\w()]+")
# Operators with spaces around them, so that templates and pointers are none.
IN_CPP = re.compile(rb"(?<= )(==|!=|<=|>=|<|>|\+|-|\*|/|&&|\|\|)(?= )|\b(true|false)\b")
NO_CODE = re.compile(rb"^\s*(?:#|template|static_assert).*|//.*|\"[^\"\n]*\"", re.M)


# A file, and the text that replaces its bytes from `begin` to `end`.
Mutant = namedtuple("Mutant", "path begin end text")


def in_python(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield the mutants of a module."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def span(node: ast.AST) -> tuple[int, int]:
        begin = starts[node.lineno - 1] + node.col_offset
        return begin, starts[node.end_lineno - 1] + node.end_col_offset

    for node in (
        node for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno")
    ):
        begin, end = span(node)
        if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
            left, right, *_ = (
                span(part)
                for part in ast.iter_child_nodes(node)
                if isinstance(part, ast.expr)
            )
            found = IN_PYTHON.search(source, left[1], right[0])
            if found and (other := SWAPS.get(found[0].decode())):
                yield Mutant(path, *found.span(), other.encode())
        elif isinstance(node, ast.If | ast.IfExp):
            begin, end = span(node.test)
            yield Mutant(path, begin, end, b"not (" + source[begin:end] + b")")
        elif isinstance(node, ast.Constant) and isinstance(old := node.value, int):
            new = not old if isinstance(old, bool) else old + 1
            yield Mutant(path, begin, end, str(new).encode())
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Mutant(path, begin, end, b"pass")
        elif isinstance(node, ast.Return) and node.value:
            yield Mutant(path, begin, end, b"return None")


def in_cpp(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield the mutants of a C++ file: its operators and truths, outside comments and strings."""
    code = NO_CODE.sub(lambda found: b" " * len(found[0]), source)
    for found in IN_CPP.finditer(code):
        yield Mutant(path, *found.span(), SWAPS[found[0].decode()].encode())


def known(words: tuple[str, ...]) -> Iterator[Mutant]:
    """Yield the mutants of the rooms whose paths have these words."""
    for path in (path for room in ROOMS for path in sorted(Path(room).rglob("*"))):
        # Only `make gpu` runs cuda.py.
        if path.suffix not in SOURCES or path.name == "cuda.py":
            continue
        if all(word in str(path) for word in words):
            of = in_python if path.suffix == ".py" else in_cpp
            yield from of(str(path), path.read_bytes())


def failure(room: str, seconds: float) -> str:
    """Run a room's tests in the copy; return their output, or "" if they pass."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--tier", "quick"]
    words += [str(path) for word in ROOMS[room].split() for path in COPY.glob(word)]
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    variables = environment() | {"ADASUM_HVD_REQUIRE_CORE": "1", "PYTHONPATH": ""}
    for command in [build] * room.endswith("core") + [words]:
        status, shown = output_of(command, variables, seconds, COPY)
        if status:
            return shown
    return ""


@functools.cache
def seconds_of(room: str) -> float:
    """Return how long a room's tests may take, after one run without a mutant."""
    began = time.monotonic()
    if shown := failure(room, 3600):
        sys.exit(f"{room}: expected tests that pass without a mutant, but got\n{shown}")
    return 60 + 3 * (time.monotonic() - began)


def main(count: str = "200", seed: str = "0", *words: str) -> None:
    """Print the diffs of survivors, then killed and survived by file."""
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(".", COPY, ignore=shutil.ignore_patterns(".*", "build"))
    found = list(known(words))
    sample = sorted(random.Random(seed).sample(found, min(int(count), len(found))))
    killed, survived = Counter[str](), Counter[str]()
    for number, (path, begin, end, text) in enumerate(sample, 1):
        room = next(room for room in ROOMS if path.startswith(room))
        limit, source = seconds_of(room), Path(path).read_bytes()
        changed = source[:begin] + text + source[end:]
        (COPY / path).write_bytes(changed)
        fails = failure(room, limit)
        (COPY / path).write_bytes(source)
        (killed if fails else survived)[path] += 1
        print(f"{number}/{len(sample)} {'killed' if fails else 'survived'}", flush=True)
        if not fails:
            old, new = (whole.decode().splitlines() for whole in (source, changed))
            print(*difflib.unified_diff(old, new, path, lineterm="", n=1), sep="\n")
    print("\n| file | killed | survived |\n|---|---|---|")
    for path in sorted({*killed, *survived}):
        print(f"| {path} | {killed[path]} | {survived[path]} |")
    print(f"killed {killed.total()} of {len(sample)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
