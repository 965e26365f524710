"""Length of sentences in the pages: at most 20 words on average, and none above 40."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.unit.pages import PAGES, REPOSITORY

MOST_ON_AVERAGE = 20  # words of a sentence, over a page
MOST = 40  # words of any sentence
# Generated tables: messages of the code, records of runs.
GENERATED = (
    *("docs/messages.md", "docs/faults.md", "docs/optimizers.md"),
    "docs/convergence/",
)


def _flat(token: Token) -> str:
    """Return the text of an inline token; code, links and pictures count as they are read."""
    parts = []
    for child in token.children or ():
        if child.type == "code_inline":
            parts.append("code")
        elif child.type == "text":
            parts.append(child.content)
        elif child.type in ("softbreak", "hardbreak"):
            parts.append(" ")
    # A list of names is one word, too.
    return re.sub(r"code(, code)+", "code", "".join(parts))


def sentences(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each sentence of a page, and whether it is prose; cells of tables are not."""
    in_table = in_heading = False
    for token in MarkdownIt().enable("table").parse(text):
        if token.type in ("table_open", "table_close"):
            in_table = token.type == "table_open"
        elif token.type in ("heading_open", "heading_close"):
            in_heading = token.type == "heading_open"
        elif token.type == "inline" and not in_heading:
            for one in re.split(r"(?<=[.!?])[\")*]*\s+", _flat(token)):
                yield one, not in_table


def words(sentence: str) -> int:
    """Return the number of words of a sentence."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def findings(text: str) -> list[str]:
    """Return the sentences that are too long, and the average if it is above the limit."""
    counted = [(words(one), one, prose) for one, prose in sentences(text)]
    found = [f"{count} words: {one}" for count, one, _ in counted if count > MOST]
    lengths = [count for count, _, prose in counted if prose and count]
    if lengths and sum(lengths) > MOST_ON_AVERAGE * len(lengths):
        found.append(f"{sum(lengths) / len(lengths):.1f} words on average")
    return found


def names() -> list[str]:
    """Return the pages to check, relative to the repository."""
    listed = [str(page.relative_to(REPOSITORY)) for page in PAGES]
    return [name for name in listed if not name.startswith(GENERATED)]


def findings_in(name: str) -> list[str]:
    """Return the findings in one page."""
    return findings((REPOSITORY / name).read_text())


def test_sentences_are_short() -> None:
    assert len(names()) > 30
    wrong = {name: found for name in names() if (found := findings_in(name))}
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


def test_long_sentences_are_found() -> None:
    assert findings("word " * 41 + ".") and not findings("word " * 20 + ".")
    assert findings("word " * 21 + "one.")[-1].endswith("on average")
    assert findings(f"| a |\n|---|\n| {'word ' * 41} |")
    assert not findings("# " + "word " * 41)
    assert not findings("`" + "word " * 41 + "`")
