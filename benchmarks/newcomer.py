"""The time from a bare clone to the demo's tables, or to the end of other targets of make.

    python3 benchmarks/newcomer.py [TARGET ...]    # of make; without one, demo

Clones the last commit into an empty folder and runs `make TARGET` there, without pip's cache,
ccache and Horovod's earlier builds. Each line that make prints gets the seconds since its start; at
the end are each target's seconds and CPU-minutes, and the sizes of the libraries that it has
compiled. It needs no package, because a newcomer has none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COLUMNS = 110


def run(target: str, folder: Path) -> int:
    """Run one target, print its lines and figures, and return its exit status."""
    began, before = time.monotonic(), sum(os.times()[2:4])
    cache = str(folder.parent / "cache")
    bare = {"PIP_NO_CACHE_DIR": "1", "CCACHE_DISABLE": "1", "ADASUM_HVD_CACHE": cache}
    process = subprocess.Popen(
        ["make", target],
        cwd=folder,
        env=os.environ | bare,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout
    for line in process.stdout:
        shown = line.rstrip().rpartition("\r")[2]  # of a line that is drawn again
        print(f"{time.monotonic() - began:6.0f} s  {shown[:COLUMNS]}", flush=True)
    status = process.wait()
    seconds, used = time.monotonic() - began, sum(os.times()[2:4]) - before
    print(
        f"make {target}: {seconds:.0f} s, {used / 60:.1f} CPU-minutes, status {status}"
    )
    return status


def main(targets: list[str]) -> int:
    """Run targets in one clone until one fails; return its exit status."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        folder = Path(name, "adasum_hvd")
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, folder], check=True)
        for target in targets:
            if status := run(target, folder):
                return status
        for library in sorted(folder.rglob("*/horovod/*/mpi_lib*.so")):
            print(
                f"{library.parent.name}/{library.name}: {library.stat().st_size / 1e6:.1f} MB"
            )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=["demo"], metavar="TARGET")
    sys.exit(main(parser.parse_args().targets))
