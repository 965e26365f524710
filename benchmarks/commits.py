"""Time of one tensor's reduction by several commits of this repository, in turn.

    python benchmarks/commits.py 1d33393 aacdd7a HEAD

Each commit is cloned below `build/commits` and built for an environment of its own, which has
this one's packages; that takes five minutes a commit. Then the commits start jobs in turn, and
a table shows every start's median of AdaSum and of Horovod's average. A start places memory and
ranks anew, so compare the medians over the starts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
WARM_UP = 5


def install(commit: str, folder: Path) -> Path:
    """Clone and build a commit; return its Python."""
    clone = folder / commit
    python = clone / ".venv" / "bin" / "python"
    if not clone.exists():
        subprocess.run(["git", "clone", "-q", REPOSITORY, clone], check=True)
    subprocess.run(["git", "checkout", "-q", commit], cwd=clone, check=True)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=clone, check=True
    )
    # This environment's packages come after the clone's own Horovod.
    paths = {"base": str(clone / ".venv"), "platbase": str(clone / ".venv")}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    (packages / "these.pth").write_text(f"{clone}\n{sysconfig.get_path('purelib')}\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path}  # which has MPI's compiler
    words = [python, "-m", "adasum_hvd", "build"]
    subprocess.run(words, cwd=clone, env=environment, check=True)
    return python


def milliseconds(
    python: Path, backend: str, ranks: int, elements: int
) -> dict[str, float]:
    """Return the medians of one start, by name."""
    import jobs

    clone = python.parents[2]
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "out.json")
        words = [*jobs.launcher(backend, ranks), str(python), __file__]
        words += ["--rank", str(elements), str(output)]
        variables = os.environ | {
            "PATH": jobs.search_path(), "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }  # fmt: skip
        _, shown = jobs.run_launcher(words, variables, jobs.LIMIT_SECONDS)
        if not output.exists():
            raise RuntimeError(f"{clone.name}: {shown[-3000:]}")
        return json.loads(output.read_text())


def rank(elements: int, output: Path) -> None:
    """Time both reductions in turn; every commit has what this uses."""
    import horovod.torch as horovod
    import torch

    import adasum_hvd.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    tensor, one = torch.randn(elements), torch.ones(1)
    times: dict[str, list[float]] = {"adasum": [], "average": []}
    for _ in range(WARM_UP + 20):
        for name, reduce, op in (
            ("adasum", hvd.allreduce_, hvd.Adasum),
            ("average", horovod.allreduce_, horovod.Average),
        ):
            tensor.mul_(1.0)
            horovod.allreduce_(one, op=horovod.Average, name="barrier")
            begin = time.perf_counter()
            reduce(tensor, op=op, name=name)
            times[name].append(time.perf_counter() - begin)
    if hvd.rank() == 0:
        medians = {
            name: 1e3 * statistics.median(of[WARM_UP:]) for name, of in times.items()
        }
        output.write_text(json.dumps(medians))


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="+", help="oldest first")
    parser.add_argument("--backend", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("build/commits"))
    arguments = parser.parse_args()
    pythons = {}
    for commit in arguments.commits:
        words = ["git", "rev-parse", "--short", commit]
        name = subprocess.check_output(words, cwd=REPOSITORY, text=True).strip()
        pythons[name] = install(name, arguments.folder.resolve())
    rows: dict[str, list[dict[str, float]]] = {commit: [] for commit in pythons}
    for start in range(arguments.starts):
        print(f"start {start + 1} of {arguments.starts}", file=sys.stderr)
        order = deque(pythons)
        order.rotate(-start)  # so that no commit always comes first
        for commit in order:
            python = pythons[commit]
            job = (python, arguments.backend, arguments.ranks, arguments.elements)
            rows[commit].append(milliseconds(*job))
    for name in ("adasum", "average"):
        for commit, starts in rows.items():
            each = sorted(row[name] for row in starts)
            shown = " ".join(f"{one:.0f}" for one in each)
            print(
                f"{name:8} {commit:10} median {statistics.median(each):6.1f} ms of {shown}"
            )


if __name__ == "__main__":
    main()
