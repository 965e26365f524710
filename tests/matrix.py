"""The torch engine from a wheel on the Pythons and torches that people have: `make matrix`.

    python tests/matrix.py                  # every pair; minutes each, and its packages' download
    python tests/matrix.py 3.14/2.15.0      # one pair
    python tests/matrix.py keras            # every Keras, with the installed TensorFlow and Horovod

Each pair has an environment of its own, one after the other, without Horovod. Interpreters are
`pythonX.Y` on the path, or pyenv's. PIP_EXTRA_INDEX_URL may name an index of CPU wheels. Rows of
pairs that ran are replaced in docs/compatibility.md.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "compatibility.md"
HEAD = "| Python, torch | unit tests | cases on 3 and 4 ranks | date |\n|---|---|---|---|\n"
# Oldest and newest are CI's: .github/workflows/ci.yml.
PAIRS = [
    "3.10/2.4.1",
    "3.11/2.8.0",
    "3.12/2.11.0",
    "3.11/2.13.0",
    "3.13/2.14.1",
    "3.14/2.15.0",
    "3.15/2.15.0",
]
KERAS_HEAD = HEAD.replace("Python, torch |", "Keras | TensorFlow |", 1)
KERAS_HEAD = KERAS_HEAD.replace("|---", "|---|---", 1).replace("3 and 4", "2 and 3", 1)
KERAS = ["3.12", "3.13", "3.14", "3.15"]
KERAS_UNIT = [
    "tests/unit/test_keras_saving.py",
    "tests/unit/test_adam_offload_keras.py",
]
KERAS_CASES = [
    f"tests/parallel/cases/keras/test_{n}.py" for n in ("optimizer", "callbacks")
]
UNIT = ["tests/unit/test_distributed.py", "tests/unit/test_rules.py"]
FOLDER = "tests/parallel/cases/distributed"
_CASES = "all_reduce", "hook", "hook_details", "rules"
CASES = [f"{FOLDER}/test_{name}.py" for name in _CASES]
# Those of sharded models, too. Before torch 2.10 a pipeline aborts. One file needs Horovod.
ALL_CASES = [FOLDER, f"--ignore={FOLDER}/test_ddp.py"]
NEEDED = ["benchmarks", "examples", "tests", "pyproject.toml"]


def interpreter(version: str) -> str:
    """Return a Python of a version that runs, or "" if there is none."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for one in [*map(str, pyenv), f"python{version}"]:
        if (
            shutil.which(one)
            and not subprocess.run(
                [one, "-c", "import venv"], capture_output=True, check=False
            ).returncode
        ):
            return one
    return ""


def wheel(folder: Path) -> Path:
    """Return a wheel of the checkout, with the core."""
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
    ]
    environment = dict(os.environ, ADASUM_HVD_REQUIRE_CORE="1")
    subprocess.run([*words, folder, REPOSITORY], check=True, env=environment)
    (found,) = folder.glob("*.whl")
    return found


def summary(python: Path | str, project: Path, *words: str, **variables: str) -> str:
    """Run pytest as a user of the wheel; return the counts, and print what failed."""
    outside = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=project,
        env=outside | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    *_, last = done.stdout.strip().splitlines() or [done.stderr[-500:]]
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-1000:])
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last)
    return ", ".join(counts) or f"no result: status {done.returncode}"


def row(pair: str, built: Path, folder: Path) -> str:
    """Return a pair's row of the table."""
    version, torch = pair.split("/")
    python, today = interpreter(version), datetime.date.today().isoformat()
    if not python:
        return f"| {pair} | no Python {version} on this machine | | {today} |"
    environment, project = folder / "environment", folder / "project"
    subprocess.run([python, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    packages = [f"torch=={torch}", "pytest", "hypothesis", str(built)]
    pip = [python, "-m", "pip", "install", "--quiet"]
    if uv := shutil.which("uv"):  # faster
        pip = [uv, "pip", "install", "--quiet", "--python", python]
    if subprocess.run([*pip, *packages], check=False).returncode:
        return f"| {pair} | the packages do not install | | {today} |"
    project.mkdir()
    for name in NEEDED:
        path = REPOSITORY / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, project / name)
    unit = summary(python, project, *UNIT)
    is_sharded = tuple(map(int, torch.split(".")[:2])) >= (2, 10)
    chosen = ALL_CASES if is_sharded else CASES
    cases = summary(python, project, *chosen, "--tier", "quick")
    return f"| {pair} | {unit} | {cases} | {today} |"


def keras_row(version: str, folder: Path) -> str:
    """Return the row of a Keras, which comes before the installed one on the path."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, folder, f"keras=={version}.*"], check=True)
    (info,) = folder.glob("keras-*.dist-info")
    full = info.name.removeprefix("keras-").removesuffix(".dist-info")
    path = {"PYTHONPATH": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3"}
    unit = summary(sys.executable, REPOSITORY, *KERAS_UNIT, **path)
    cases = summary(sys.executable, REPOSITORY, *KERAS_CASES, **path)
    tensorflow = importlib.metadata.version("tensorflow-cpu")
    today = datetime.date.today().isoformat()
    return f"| {full} | {tensorflow} | {unit} | {cases} | {today} |"


def write(rows: dict[str, str], head: str = HEAD) -> None:
    """Replace these rows in the page's table, and add new ones."""
    before, rest = PAGE.read_text().split(head)
    table, after = rest.split("\n\n", 1)
    known = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    found = known | rows
    order = [pair for pair in PAIRS if pair in found] if head == HEAD else sorted(found)
    lines = [found[name] for name in order]
    PAGE.write_text(before + head + "\n".join(lines) + "\n\n" + after)


def main() -> None:
    os.nice(10)
    if sys.argv[1:2] == ["keras"]:
        for version in sys.argv[2:] or KERAS:
            with tempfile.TemporaryDirectory() as name:
                row_of = keras_row(version, Path(name))
            print(row_of, flush=True)
            write({row_of.split(" | ")[0].strip("| "): row_of}, KERAS_HEAD)
        return
    with tempfile.TemporaryDirectory() as name:
        built, rows = wheel(Path(name)), {}
        for pair in sys.argv[1:] or PAIRS:
            with tempfile.TemporaryDirectory(
                dir=name
            ) as folder:  # an environment has GBs
                rows[pair] = row(pair, built, Path(folder))
            print(rows[pair], flush=True)
            write(rows)


if __name__ == "__main__":
    main()
