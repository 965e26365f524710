"""List every error message of the code, each with an action, in docs/messages.md.

python docs/messages.py
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "adasum_hvd"
PAGE = REPOSITORY / "docs" / "messages.md"
HEADING = "## The list\n"
# A statement that throws or returns an error with a literal text, to its end.
_NATIVE = re.compile(
    r"(?:throw [\w:]+|InvalidArgument|: std::\w+_error|Refuse|return|=)[\s(]+"
    r"((?:std::string\()?[^;{}]*?\"[^;{}]*)[;{]"
)


# Actions for messages that name none: the start of a file's path, words of the message, the
# action. The first row that matches counts.
ACTIONS = PAGE.with_suffix(".csv")


def text_of(node: ast.expr) -> str:
    """Return a message with `...` in place of values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "..."
            for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "..."


def _call(node: ast.AST) -> ast.expr | None:
    """Return the call that makes an error which is raised or returned, or that warns."""
    if isinstance(node, ast.Raise):
        return node.exc
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    is_message = re.fullmatch(r"\w*(Error|Mismatch)|warnings\.warn", called)
    return node if is_message else None


def of_python() -> Iterator[tuple[str, str]]:
    """Yield (message, file) of every error and warning with a literal text."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            call = _call(node)
            if isinstance(call, ast.Call):
                for argument in call.args[:1]:
                    yield text_of(argument), str(path.relative_to(PACKAGE))


def of_native() -> Iterator[tuple[str, str]]:
    """Yield (message, file) of every native error with a literal text."""
    for path in (*(PACKAGE / "core").rglob("*"), *(PACKAGE / "horovod").rglob("*")):
        if path.suffix in (".cc", ".h", ".cu"):
            for thrown in _NATIVE.findall(path.read_text()):
                parts = re.findall(r'"((?:[^"\\]|\\.)*)"', thrown)
                is_error = "expected" in thrown
                if is_error or thrown.startswith(("std::string", '"')):
                    yield (
                        "...".join(parts).replace('\\"', '"'),
                        str(path.relative_to(PACKAGE)),
                    )


def parted(message: str) -> tuple[str, str]:
    """Return the error and its remedy, which follows a semicolon outside parentheses."""
    depth = 0
    for place, letter in enumerate(message):
        depth += (letter == "(") - (letter == ")")
        is_end = depth == 0 and message[place : place + 2] == "; "
        if is_end and not message[place + 2 :].startswith("got "):
            return message[:place], message[place + 2 :]
    return message, ""


def action_for(message: str, file: str) -> str:
    """Return the action for a message that names none.

    Raises:
        ValueError: no row of the table matches; end the message with "; do this".
    """
    for row in csv.DictReader(ACTIONS.read_text().splitlines()):
        if file.startswith(row["path"]) and re.search(row["words"], message):
            return row["action"]
    raise ValueError(
        f"{file}: {message!r}: expected an action after '; ', but got none"
    )


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", r"\*")


def rows() -> list[str]:
    """Return the table's rows (message, remedy, file), sorted by the message's words."""
    found = {}
    for message, file in (*of_python(), *of_native()):
        message = (
            re.sub(r"(\.\.\.)+", "...", " ".join(message.split()))
            .lstrip(": ")
            .replace("|", "\\|")
        )
        if " " in message and re.search("[a-z]{3} ?[a-z]{2}", message):
            what, remedy = parted(message)
            if not re.search("[a-z]{3}", remedy):
                remedy = action_for(what, file)
            row = f"| {_cell(what)} | {_cell(remedy)} | `{file}` |"
            found[row] = re.sub(r"\W+", " ", what).strip().lower()
    return sorted(found, key=lambda row: (found[row], row))


def section() -> str:
    """Return the text after the heading."""
    head = "| message (`...` is filled in) | what to do | raised in |\n|---|---|---|\n"
    return "\n" + head + "\n".join(rows()) + "\n"


def main() -> None:
    """Write the page."""
    before, heading, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(before + heading + section())


if __name__ == "__main__":
    main()
