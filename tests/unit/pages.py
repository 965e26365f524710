"""The repository's Markdown, parsed: code blocks, links, tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "docker/*.md", "examples/*.md")
    for path in REPOSITORY.glob(pattern)
)


def tokens(page: Path) -> Iterator[Token]:
    """Yield all tokens of a page, also inline ones."""
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        yield token
        yield from token.children or ()


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a language; "" means blocks without one and indented blocks."""
    found = [t for t in tokens(page) if t.type in ("fence", "code_block")]
    return [
        _after(t.content) if t.info == "diff" else t.content
        for t in found
        if t.info == language or (t.info == "diff" and language == "python")
    ]


def _after(diff: str) -> str:
    """Return the text after applying a diff."""
    kept = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join(kept)


def links(page: Path) -> list[str]:
    """Return the targets of links and pictures."""
    found = [t.attrGet("href") or t.attrGet("src") for t in tokens(page)]
    return [str(target) for target in found if target]


def quoted(page: Path) -> list[str]:
    """Return the texts between backquotes."""
    return [t.content for t in tokens(page) if t.type == "code_inline"]


def tables(page: Path) -> list[list[list[str]]]:
    """Return the tables: rows of cells, the head first."""
    found: list[list[list[str]]] = []
    inside = False
    for token in tokens(page):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open", "th_close", "td_close"):
            inside = token.type.endswith("open")
        elif inside and token.type == "inline":
            found[-1][-1].append(token.content)
    return found
