"""What the documents say exists: links, code, make targets, commands of `adasum-hvd`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adasum_hvd import cli

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "docker/*.md")
    for path in REPOSITORY.glob(pattern)
)
TARGETS = set(
    re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
)

every_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY))
)


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (document.parent / target).exists(), target


@every_document
def test_named_files_exist(document: Path) -> None:
    pattern = r"`((?:adasum_hvd|benchmarks|docker|docs|examples|tests)/[\w./-]*)`"
    for name in re.findall(pattern, document.read_text()):
        assert (REPOSITORY / name).exists(), name


@every_document
def test_python_blocks_compile(document: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)
    for block in blocks:
        compile(block, str(document), "exec")


@every_document
def test_commands_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"(?:^|`)(?:sudo )?make ([a-z-]+)\b", text, re.MULTILINE):
        assert target in TARGETS, f"make {target}"
    for line in re.findall(r"^adasum-hvd [^#\n]*", text, re.MULTILINE):
        words = line.strip().replace("'", "").split()[1:]
        assert cli.make_parser().parse_args(words), line


def test_cited_rows_are_explained() -> None:
    replaced = (REPOSITORY / "docs" / "replaced.md").read_text()
    explained = set(re.findall(r"^## (1[A-Z])\.", replaced, re.MULTILINE))
    cited = {
        row
        for path in (REPOSITORY / "adasum_hvd").rglob("*.py")
        for line in re.findall(r"SEEDS row.*", path.read_text())
        for row in re.findall(r"\b1[A-Z]\b", line)
    }
    assert cited and cited <= explained
    for name in re.findall(r"`([\w/*]+\.(?:py|cc))", replaced):
        places = REPOSITORY / "adasum_hvd", REPOSITORY
        assert any(list(place.glob(name)) for place in places), name


def test_there_are_documents() -> None:
    assert REPOSITORY / "README.md" in DOCUMENTS
    assert {"setup", "test", "lint", "docs"} <= TARGETS
