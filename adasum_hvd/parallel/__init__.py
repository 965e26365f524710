"""Parallel modes in which AdaSum can run, and detection of the mode that a job uses.

- `context.py`: a description of the job, and MindSpore's rules on it;
- `findings.py`: modes that were detected, and their error;
- `torch_modes.py`, `tensorflow_modes.py`: detection from the frameworks' own objects.

This package imports no framework; the last two modules use frameworks that are loaded already.
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
