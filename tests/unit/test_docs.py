"""Links, files, names in code, make targets and commands of the pages exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from adasum_hvd import cli
from tests.unit import pages
from tests.unit.pages import PAGES, REPOSITORY

FOLDERS = ("adasum_hvd/", "benchmarks/", "docker/", "docs/", "examples/", "tests/")
every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY))
)


@every_page
def test_links_resolve(page: Path) -> None:
    for target in pages.links(page):
        if ":" not in target:
            assert (page.parent / target.split("#")[0]).exists(), target


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    tokens = list(pages.tokens(page))
    titles = [
        "".join(child.content for child in after.children or ())
        for token, after in pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {
        re.sub(r"[ -]+", "-", re.sub(r"[^\w -]", "", title.lower())) for title in titles
    }


@every_page
def test_anchors_resolve(page: Path) -> None:
    for target in pages.links(page):
        file, _, anchor = target.partition("#")
        if anchor and ":" not in target:
            there = page.parent / file if file else page
            assert anchor in anchors(there), target


@every_page
def test_pictures_have_a_description(page: Path) -> None:
    for token in pages.tokens(page):
        if token.type == "image":
            assert len(token.content.split()) >= 3, token.attrGet("src")


@every_page
def test_named_files_exist(page: Path) -> None:
    for name in pages.quoted(page):
        if name.startswith(FOLDERS) and " " not in name:
            assert list(REPOSITORY.glob(name.split("::")[0].rstrip("/"))), name


def hvd_of(tree: ast.Module) -> ModuleType | None:
    """Return the module that a block imports as hvd."""
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname == "hvd"
    ]
    return importlib.import_module(names[0]) if names else None


@every_page
def test_names_used_in_python_blocks_exist(page: Path) -> None:
    hvd = None
    for block in pages.blocks(page, "python"):
        tree = ast.parse(block)
        hvd = hvd_of(tree) or hvd
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hvd":
                # A page whose blocks import no framework is about torch.
                module = hvd or importlib.import_module("adasum_hvd.torch")
                assert hasattr(module, node.attr), ast.unparse(node)


FRAMEWORKS = {"torch", "keras", "tf", "np", "nn", "functional"}


@every_page
def test_python_blocks_import_their_frameworks(page: Path) -> None:
    known: set[str] = set()
    for block in pages.blocks(page, "python"):
        tree = ast.parse(block)
        imports = [
            n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)
        ]
        known |= {a.asname or a.name.split(".")[0] for n in imports for a in n.names}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not imports or not (used & FRAMEWORKS) - known, block


PROGRAMS = [*PAGES, *sorted((REPOSITORY / "examples").glob("*.py"))]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda path: path.name)
def test_horovodrun_commands_name_their_backend(file: Path) -> None:
    """Its default is MPI, with flags of Open MPI 4 for any Open MPI."""
    text = re.sub(r"\\+\n", " ", file.read_text())
    for command in re.findall(r"horovodrun [^`|\n]*python\b", text):
        assert re.search(r"--(gloo|mpi)\b", command), command


@every_page
def test_commands_exist(page: Path) -> None:
    for block in pages.blocks(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.startswith(("adasum-hvd ", "make ")) and shlex.split(
                line, True
            )
            if words and words[0] == "adasum-hvd":
                assert cli.make_parser().parse_args(words[1:]), line
            if words and words[0] == "make":
                command = ["make", "--dry-run", *words[1:]]
                ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True)
                assert ran.returncode == 0, (line, ran.stderr)


def test_readme_is_short_and_links_to_every_page() -> None:
    readme = REPOSITORY / "README.md"
    assert len(readme.read_text().splitlines()) <= 120
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in pages.links(page)
        if ":" not in target and not target.startswith("#")
    }
    for page in PAGES:
        assert page == readme or page in linked, page


def test_every_page_is_in_the_site() -> None:
    listed = (REPOSITORY / "mkdocs.yml").read_text()
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert re.search(rf": {page.name}$", listed, re.M), page
    for name in re.findall(r": repository/(.*)$", listed, re.M):
        assert (REPOSITORY / name).exists(), name


def script(name: str) -> ModuleType:
    """Return a program of docs/ as a module."""
    path = REPOSITORY / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_launcher_is_in_the_table_of_clusters() -> None:
    launchers = script("launchers")
    text = launchers.PAGE.read_text()
    assert launchers.page(text) == text, "run `python docs/launchers.py`"
    assert launchers.table().count("| `") > 12 and launchers.table() in text


def test_every_error_message_is_in_the_list_with_an_action() -> None:
    messages = script("messages")
    page = messages.PAGE.read_text()
    missing = [row for row in messages.rows() if row not in page]
    assert not missing, f"run `python docs/messages.py` for {missing}"
    assert page.endswith(messages.section()), "run `python docs/messages.py`"
    assert len(messages.rows()) > 200
    for row in messages.rows():
        action = re.sub(r"\[.*?\]\(.*?\)", "", row.split(" | ")[-2])
        assert re.search(r"[a-z]{3} [-A-Za-z`]+", action), row
    for name in ("torch/optimizer/gradient.py", "core/host/transport.h"):
        assert f"`{name}`" in page


def test_messages_that_troubleshooting_quotes_are_in_the_list() -> None:
    listed = (REPOSITORY / "docs/messages.md").read_text()
    texts = pages.quoted(REPOSITORY / "docs/troubleshooting.md")
    quoted = [
        text for text in texts if re.match("(.*: )?(expected|got|required) ", text)
    ]
    assert len(quoted) >= 6
    for text in quoted:
        assert text in listed, text


def test_pages_are_read() -> None:
    """Otherwise all tests above would pass on empty lists."""
    readme = REPOSITORY / "README.md"
    assert readme in PAGES and len(PAGES) > 10
    assert "docs/convergence.md" in pages.links(readme)
    assert len(pages.tables(readme)) >= 3
    assert len(pages.blocks(readme, "python")) == 3
    assert "torchrun" in pages.blocks(readme, "")[0]
    for command in ("`make demo`", "`make test`"):
        assert command in readme.read_text()
    assert sum(len(pages.quoted(page)) for page in PAGES) > 500
