"""Everything that needs a CUDA device, in the order in which a first device should meet it.

    python tests/gpu/first.py --output build/gpu   # `make gpu`

A step that cannot run is counted as skipped, with the reason; a step that fails does not keep
the later ones from running. The output of each step is in the output folder, figures as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
sys.path.insert(0, str(REPOSITORY))

from adasum_hvd.horovod.build import nccl  # noqa: E402

SECONDS = 3600  # that a step may take
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # ranks beyond the devices share them
Reason = Callable[[], str | None]


def no_device() -> str | None:
    """Return why there is no device."""
    found = any(Path("/dev").glob("nvidia[0-9]*"))
    return None if found else "expected a CUDA device, but got none on this machine"


def no_nvcc() -> str | None:
    """Return why there is no compiler."""
    try:
        nccl.cuda_home()
    except nccl.Missing as error:
        return str(error)
    return None


def no_sanitizer() -> str | None:
    """Return why nothing can be sanitized."""
    found = shutil.which("compute-sanitizer")
    return None if found else "expected compute-sanitizer, but got none on PATH"


def no_torch_with_cuda() -> str | None:
    """Return why torch has no devices."""
    return (
        None
        if nccl.torch_has_cuda()
        else "expected torch built with CUDA, but got none"
    )


def no_horovod_with_nccl() -> str | None:
    """Return why nothing is reduced on devices; asked when the build has been tried."""
    asked = "import horovod.torch as h; raise SystemExit(not h.nccl_built())"
    if importlib.util.find_spec("horovod") is None:
        return "expected Horovod, but got none"
    words = [sys.executable, "-c", asked]
    built = subprocess.run(words, capture_output=True, check=False)
    return (
        None if built.returncode == 0 else "expected a Horovod with NCCL, but got none"
    )


@dataclass(frozen=True)
class Step:
    """A command, and what it needs."""

    name: str
    command: Sequence[str]
    needs: Sequence[Reason] = ()

    def missing(self) -> str | None:
        """Return the first reason why it cannot run."""
        return next((why for need in self.needs if (why := need())), None)


def pytest_of(*words: str) -> list[str]:
    """Return the words of a run of tests."""
    return [sys.executable, "-m", "pytest", "-ra", *words]


def benchmark(what: str, output: Path, *words: str) -> list[str]:
    """Return the words of a part of the benchmark, strict about what it finds."""
    figures = str(output / f"{what}{''.join(words)}.json")
    script = str(REPOSITORY / "benchmarks" / "gpu.py")
    return [sys.executable, script, what, "--strict", "--json", figures, *words]


def training(op: str) -> list[list[str]]:
    """Return the words of both training runs: digits, and ResNet-50 on synthetic data."""
    job = [sys.executable, "-m", "adasum_hvd", "exec", "--nprocs", "4", "--"]
    examples = REPOSITORY / "examples"
    return [
        [*job, sys.executable, str(examples / "torch_digits.py"), "--op", op, "--device", "cuda"],
        [
            *job, sys.executable, str(examples / "resnet50_imagenet.py"), "--data", "synthetic",
            "--max-steps", "20", "--boost-level", "O0" if op == "average" else "O2",
        ],
    ]  # fmt: skip


def steps(output: Path) -> list[Step]:
    """Return what is done, in this order."""
    kernels = "tests/gpu/test_kernels.py"
    compiled = (no_nvcc, no_device)
    ranks = (no_device, no_torch_with_cuda, no_horovod_with_nccl)
    build = [str(BIN / "adasum-hvd"), "build", "--gpu", "nccl"]
    trained = [
        Step(f"training, {what}, {op}", words, ranks)
        for op in ("adasum-grad", "average")
        for what, words in zip(("digits", "ResNet-50"), training(op), strict=True)
    ]
    return [
        Step("kernels", pytest_of(kernels, "-k", "not sanitizer"), compiled),
        Step("kernels' bandwidth", benchmark("kernels", output), compiled),
        Step("Triton's kernels", benchmark("triton", output), (no_device, no_torch_with_cuda)),
        Step(
            "ranks as threads",
            pytest_of("tests/unit/test_thread_ranks.py", "-k", "cuda"),
            (no_device, no_torch_with_cuda),
        ),
        Step("the NCCL build", build, (no_nvcc, no_device, no_torch_with_cuda)),
        Step(
            "torch.distributed",
            pytest_of("tests/gpu/test_distributed.py"),
            (no_device, no_torch_with_cuda),
        ),
        Step("the op and AdamOffload", pytest_of("tests/gpu", f"--ignore={kernels}"), ranks),
        Step(
            "compute-sanitizer",
            pytest_of(kernels, "-k", "sanitizer"),
            (*compiled, no_sanitizer),
        ),
        *(
            Step(
                f"the op's time, {number} ranks",
                benchmark("op", output, "--ranks", str(number)),
                ranks,
            )
            for number in (2, 4)
        ),
        Step("no call waits for the device", benchmark("trace", output), ranks),
        Step("AdamOffload's time", benchmark("adam", output), (no_device, no_torch_with_cuda)),
        *trained,
    ]  # fmt: skip


def take(step: Step, number: int, output: Path) -> tuple[str, str]:
    """Run a step; return what became of it, and why."""
    if why := step.missing():
        return "skipped", why
    log = output / f"{number:02}.log"
    started = time.monotonic()
    with log.open("w") as output:
        try:
            status = subprocess.run(
                step.command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT,
                timeout=SECONDS, check=False, env=os.environ | SHARED,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = 124
    taken = f"{time.monotonic() - started:.0f} s, {log}"
    return ("passed" if status == 0 else "failed"), taken


def main() -> int:
    """Take every step; return 1 where one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build", "gpu"))
    output = parser.parse_args().output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for number, step in enumerate(steps(output), 1):
        became, why = take(step, number, output)
        counts[became] += 1
        print(f"{became:8} {step.name}: {why}", flush=True)
    print(", ".join(f"{count} {became}" for became, count in counts.items()))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
