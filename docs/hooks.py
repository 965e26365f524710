"""What the site does to pages: links that leave docs/ become the names of files."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)\s]+)\)")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return the page's text without links to files that the site does not hold."""
    return _OUTSIDE.sub(r"`\2`", markdown)
