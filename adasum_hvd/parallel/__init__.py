"""Which parallel modes AdaSum can run in, and which one a job really uses.

- `context.py`: the rules of MindSpore's AdaSum cells, on a description of the job;
- `findings.py`: what was found in a running program, and the error it becomes;
- `torch_modes.py`, `tensorflow_modes.py`: finding it, from the frameworks' own objects.

This package imports no framework; the two last modules look at what is loaded already.
"""

from adasum_hvd.mindspore.context import MODES, ParallelContext, check
from adasum_hvd.parallel.findings import FOUND_MODES, Finding, refuse

__all__ = ["FOUND_MODES", "MODES", "Finding", "ParallelContext", "check", "refuse"]
