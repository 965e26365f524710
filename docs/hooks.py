"""Hooks of the site: pages for files outside docs/, links by title, docstrings without roles."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")
_PROCESS_SET = re.compile(r"&lt;horovod\S*ProcessSet object at 0x[0-9a-f]+&gt;")
_REDUCE_OP = re.compile(r"&lt;ReduceOp\.(\w+): \d+&gt;")
# The same in signatures, which are highlighted.
_PROCESS_SET_TOKENS = re.compile(
    r"=&lt;</span><span[^>]*>horovod</span>.{,250}?<span[^>]*>0x[0-9a-f]+</span>"
    r"<span[^>]*>&gt;</span>"
)
_REDUCE_OP_TOKENS = re.compile(
    r"=&lt;</span><span[^>]*>ReduceOp</span><span[^>]*>\.</span><span[^>]*>(\w+)</span>"
    r"<span[^>]*>:</span> <span[^>]*>\d+</span><span[^>]*>&gt;</span>"
)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_DOCS_PAGE = re.compile(r"(?<![\w/.\"-])docs/(\w+)\.md\b")
# Where the site keeps pages for files outside docs/.
_OUTSIDE = "repository/"
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sbatch": "bash"}


def _titles(nav: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the file and the title of every page."""
    for entry in nav:
        for title, inside in entry.items():
            if isinstance(inside, str):
                yield inside, title
            else:
                yield from _titles(inside)


def _in_repository(page: str) -> str:
    """Return a page's path in the repository."""
    return page.removeprefix(_OUTSIDE) if page.startswith(_OUTSIDE) else f"docs/{page}"


def _on_site(path: str) -> str:
    """Return the page for a path in the repository; a folder below docs/ has one, too."""
    if path.startswith("docs/") and Path(path).suffix:
        return path.removeprefix("docs/")
    return _OUTSIDE + path + ("" if path.endswith(".md") else ".md")


def _target(page: str, link: str) -> str:
    """Return the path in the repository that a page's link leads to."""
    folder = posixpath.dirname(_in_repository(page))
    return posixpath.normpath(posixpath.join(folder, link))


def _block(file: Path) -> str:
    """Return a file's text as a code block."""
    return f"```{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}```\n"


def _text(path: Path) -> str:
    """Return a file's page: Markdown as it is, others as code; a folder's files or records."""
    if path.suffix == ".md":
        return path.read_text()
    if path.is_file():
        return f"# {path.name}\n\n{_block(path)}"
    files = [file for file in sorted(path.iterdir()) if file.is_file()]
    if path.parts[-2] == "convergence":  # records, which the site holds as they are
        parts = [f"- [{file.name}]({path.name}/{file.name})" for file in files]
    else:
        parts = [f"## {file.name}\n\n{_block(file)}" for file in files]
    return f"# {path.name}\n\n" + "\n".join(parts) + "\n"


def on_files(files: Files, *, config: Any, **kwargs: Any) -> Files:
    """Add a page for every file outside docs/ that a page or the navigation names."""
    root = Path(config["config_file_path"]).parent
    left = [
        (file.src_uri, Path(file.abs_src_path).read_text())
        for file in files.documentation_pages()
    ]
    for name, _ in _titles(config["nav"]):
        if name.startswith(_OUTSIDE):
            left.append(("", f"[]({_in_repository(name)})"))
    while left:
        page, text = left.pop()
        for _, link, _ in _LINK.findall(text):
            path = _target(page, link) if page else link
            name = _on_site(path)
            if name.startswith("..") or files.get_file_from_path(name):
                continue
            if ":" in link or not (root / path).exists():
                continue  # an address, or an error that mkdocs reports
            content = _text(root / path)
            files.append(File.generated(config, name, content=content))
            if path.endswith(".md"):
                left.append((name, content))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **kwargs: Any) -> str:
    """Return the page with links to the site's own pages; a link `[x.md](x.md)` by title."""
    titles = dict(_titles(config["nav"]))
    here = page.file.src_uri
    if re.search(r"\.\w+\.md$", here):
        return markdown  # a program

    def linked(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        if ":" in link:
            return match[0]
        name = _on_site(_target(here, link))
        if text.endswith(".md") and name in titles:
            text = titles[name]
        relative = posixpath.relpath(name, posixpath.dirname(here) or ".")
        return f"[{text}]({relative}{anchor})"

    return _LINK.sub(linked, markdown)


def on_page_content(html: str, *, page: Any, config: Any, **kwargs: Any) -> str:
    """Return the page without roles, with defaults by name, and with links for `docs/x.md`."""
    html = _PROCESS_SET.sub("global_process_set", _ROLE.sub("", html))
    html = _REDUCE_OP.sub(r"\1", html).replace("NoneCompressor", "Compression.none")
    html = _PROCESS_SET_TOKENS.sub(
        '=</span><span class="n">global_process_set</span>', html
    )
    html = _REDUCE_OP_TOKENS.sub(r'=</span><span class="n">\1</span>', html)
    if re.search(r"\.\w+\.md$", page.file.src_uri):
        return html  # a program: its text stays as it is
    titles = dict(_titles(config["nav"]))
    up = posixpath.relpath(".", posixpath.dirname(page.file.src_uri) or ".")

    def linked(match: re.Match[str]) -> str:
        title = titles.get(f"{match[1]}.md")
        return f'<a href="{up}/{match[1]}.html">{title}</a>' if title else match[0]

    return _DOCS_PAGE.sub(linked, html)
