"""What the site does to pages: links by title or out of docs/, what docstrings have of Sphinx."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")
_PROCESS_SET = re.compile(r"&lt;horovod\S*ProcessSet object at 0x[0-9a-f]+&gt;")
_BY_FILE = re.compile(r"\[[\w/]+\.md\]\((\w+\.md)([^)]*)\)")
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)\s]+)\)")


def _titles(nav: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the file and the title of every page."""
    for entry in nav:
        for title, inside in entry.items():
            if isinstance(inside, str):
                yield inside, title
            else:
                yield from _titles(inside)


def on_page_markdown(markdown: str, *, config: Any, **kwargs: Any) -> str:
    """Return the page's text without links to what the site does not hold, others by title."""
    titles = dict(_titles(config["nav"]))
    named = _BY_FILE.sub(
        lambda link: f"[{titles[link[1]]}]({link[1]}{link[2]})", markdown
    )
    return _OUTSIDE.sub(r"`\2`", named)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Return the page without roles, and with defaults by name."""
    return _PROCESS_SET.sub("global_process_set", _ROLE.sub("", html))
