"""Benchmarks say where their figures come from, and the planner and its model agree."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import jobs


def test_figures_come_with_versions_and_hardware():
    machine = jobs.machine()
    assert machine["processor"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**28
    for package in ("torch", "horovod"):
        assert machine[package] == metadata.version(package)
    for path in BENCHMARKS.glob("*.py"):
        text = path.read_text()
        writes = "import json" in text and "import argparse" in text
        assert not writes or "jobs.machine()" in text, path.name
