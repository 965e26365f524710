"""The changes of a file that `make mutants` tries, each of one operator, constant or statement.

None is of annotations, of texts, or of how an error is put, which no test should pin.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import namedtuple
from collections.abc import Iterator

SWAPS = {
    "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+",
    "*": "+", "/": "*", "//": "*", "and": "or", "or": "and", "is not": "is", "is": "is not",
    "not in": "in", "in": "not in", "&&": "||", "||": "&&", "true": "false", "false": "true",
}  # fmt: skip
IN_PYTHON = re.compile(rb"not in|is not|[a-z]+|[^\s\w()]+")
# Operators with spaces around them, so that templates and pointers are none.
IN_CPP = re.compile(rb"(?<= )(==|!=|<=|>=|<|>|\+|-|\*|/|&&|\|\|)(?= )|\b(true|false)\b")
NO_CODE = re.compile(rb"^\s*(?:#|template|static_assert).*|//.*|\"[^\"\n]*\"", re.M)
# Of these no test should pin the details: texts, and how an error is put.
TEXTS = ast.JoinedStr | ast.Raise
# Fields and keywords; `strict` checks lengths that callers guarantee.
NO_VALUES = {"annotation", "returns", "stacklevel", "strict"}
NOTHING = "", "None", "False"  # returned values that are as false as None
# A file, the text that replaces its bytes from `begin` to `end`, and, inside functions, the bytes
# of the expression that is evaluated if the mutant is.
Mutant = namedtuple("Mutant", "path begin end text expression")


def nodes(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes whose values a test can notice, and whether a function has them."""
    yield node, inside
    for name, value in ast.iter_fields(node):
        of = inside or (isinstance(node, ast.FunctionDef) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            skip = isinstance(child, TEXTS) or getattr(child, "arg", name) in NO_VALUES
            if isinstance(child, ast.AST) and name not in NO_VALUES and not skip:
                yield from nodes(child, of)


def in_python(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield the mutants of a module."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def span(node: ast.AST) -> tuple[int, int]:
        begin = starts[node.lineno - 1] + node.col_offset
        return begin, starts[node.end_lineno - 1] + node.end_col_offset

    for node, inside in nodes(ast.parse(source)):
        part, where, text = node, None, b""
        if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
            left, right, *_ = (
                span(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)
            )  # fmt: skip
            if found := IN_PYTHON.search(source, left[1], right[0]):
                where, text = found.span(), SWAPS.get(found[0].decode(), "").encode()
        elif isinstance(node, ast.If | ast.IfExp):
            part, where = node.test, span(node.test)
            text = b"not (" + source[slice(*where)] + b")"
            if ast.unparse(part) == "TYPE_CHECKING":
                continue
        elif isinstance(node, ast.Constant) and isinstance(old := node.value, int):
            new = not old if isinstance(old, bool) else old + 1
            where, text = span(node), str(new).encode()
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            part, where, text = node.value, span(node), b"pass"
        elif isinstance(node, ast.Return) and ast.unparse(node)[7:] not in NOTHING:
            part, where, text = node.value, span(node), b"return None"
        if where and text:
            yield Mutant(path, *where, text, span(part) if inside else None)


def in_cpp(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield the mutants of a C++ file: its operators and truths, outside comments and strings."""
    code = NO_CODE.sub(lambda found: b" " * len(found[0]), source)
    for found in IN_CPP.finditer(code):
        yield Mutant(path, *found.span(), SWAPS[found[0].decode()].encode(), None)
