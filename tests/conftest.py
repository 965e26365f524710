"""What the tests of all folders share."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "tests/native",
    "tests/unit",
    "tests/compatibility",
    "benchmarks",
    "examples",
    "docs",
)
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

# How long an example takes says something of this machine's other work only.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
