"""Messages are there without any set-up, once, and a program's own logging takes them over."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAY = "from adasum_hvd import messages; "
SAY_ON = "messages.speak_on({rank}); messages.logger.info('hello'); "
OWN = "import logging, sys; logging.basicConfig(stream=sys.stdout, format='own %(message)s'); "


@pytest.mark.parametrize(
    ("before", "ranks", "out", "err"),
    [
        ("", [0], "", "adasum_hvd: hello\n"),
        ("", [1], "", ""),
        (OWN, [0], "own hello\n", ""),
        (OWN + "logging.getLogger('adasum_hvd').setLevel('ERROR'); ", [0], "", ""),
        (OWN + "logging.getLogger('adasum_hvd').setLevel('WARNING'); ", [1, 0], "", ""),
        ("", [2, 1, 0], "", "adasum_hvd: hello\n"),
        ("", [0, 1, 1], "", "adasum_hvd: hello\n"),
    ],
    ids=[
        "console",
        "second rank",
        "own",
        "level before import",
        "level kept when the first",
        "becomes the first",
        "is the first no more",
    ],
)
def test_who_hears_what(before: str, ranks: list[int], out: str, err: str) -> None:
    said = [SAY_ON.format(rank=rank) for rank in ranks]
    shown = subprocess.run(
        [sys.executable, "-c", before + SAY + "".join(said)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (shown.stdout, shown.stderr) == (out, err)
