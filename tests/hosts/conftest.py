"""The launcher of the parallel tests and the hosts of the benchmarks serve here too."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "parallel")]
