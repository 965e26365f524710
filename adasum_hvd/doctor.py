"""Explain an installation: what is there, what is missing, which command mends it."""

from __future__ import annotations

from adasum_hvd import build, prerequisites


def run() -> int:
    """Print one line per finding; return 0 when AdaSum can run here, else 1."""
    return 0 if not prerequisites.missing() and build.installed_frameworks() else 1
