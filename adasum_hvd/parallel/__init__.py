"""Parallel modes in which AdaSum can run, and detection of the mode that a job uses.

This package imports no framework; its `*_modes.py` use frameworks that are loaded already.
"""

from adasum_hvd.parallel.context import MODES, ParallelContext, check
from adasum_hvd.parallel.findings import FOUND_MODES, ParallelModeFinding, refuse

__all__ = [
    "FOUND_MODES",
    "MODES",
    "ParallelContext",
    "ParallelModeFinding",
    "check",
    "refuse",
]
