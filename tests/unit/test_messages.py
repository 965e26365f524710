"""Messages are there without any set-up, once, and a program's own logging takes them over."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAY = "from adasum_hvd import messages; messages.speak_on({rank}); messages.logger.info('hello')"
OWN = "import logging, sys; logging.basicConfig(stream=sys.stdout, format='own %(message)s'); "


@pytest.mark.parametrize(
    ("before", "rank", "out", "err"),
    [
        ("", 0, "", "adasum_hvd: hello\n"),
        ("", 1, "", ""),
        (OWN, 0, "own hello\n", ""),
        (OWN + "logging.getLogger('adasum_hvd').setLevel('ERROR'); ", 0, "", ""),
    ],
    ids=["console", "second rank", "own", "level before import"],
)
def test_who_hears_what(before: str, rank: int, out: str, err: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", before + SAY.format(rank=rank)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (shown.stdout, shown.stderr) == (out, err)
