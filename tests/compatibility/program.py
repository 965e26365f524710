"""Runs a program of Horovod's whose imports give ours.

program.py MODULE,MODULE PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.compatibility.swap import swap

if __name__ == "__main__":
    swap(filter(None, sys.argv[1].split(",")))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
