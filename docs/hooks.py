"""What the site does to pages: links that leave docs/, and what docstrings have of Sphinx."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")
_FORMULA = re.compile(r"<p>\.\. math::\s*(.*?)</p>", re.S)
_PROCESS_SET = re.compile(r"&lt;horovod\S*ProcessSet object at 0x[0-9a-f]+&gt;")
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)\s]+)\)")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return the page's text without links to files that the site does not hold."""
    return _OUTSIDE.sub(r"`\2`", markdown)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Return the page without roles, and formulas as they were typed, defaults by name."""
    html = _PROCESS_SET.sub("global_process_set", _ROLE.sub("", html))
    return _FORMULA.sub(r'<pre style="white-space: pre-wrap">\1</pre>', html)
