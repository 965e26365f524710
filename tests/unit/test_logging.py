"""Logging works without set-up, on rank 0 only; a program's own handlers replace the console."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT = "from adasum_hvd.base.logging import log_on_first_rank, logger; "
LOG = "log_on_first_rank({rank}); logger.info('hello'); "
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
def test_which_ranks_log(before: str, ranks: list[int], out: str, err: str) -> None:
    statements = [LOG.format(rank=rank) for rank in ranks]
    shown = subprocess.run(
        [sys.executable, "-c", before + IMPORT + "".join(statements)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (shown.stdout, shown.stderr) == (out, err)
