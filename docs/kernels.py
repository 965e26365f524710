"""List the registers of every CUDA kernel in docs/devices.md, as ptxas counts them.

python docs/kernels.py
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from adasum_hvd.horovod.build import nccl
from adasum_hvd.horovod.build.sources import INCLUDES, NATIVE, cache_dir, native_files

PAGE = Path(__file__).with_name("devices.md")
BEGIN, END = "<!-- python docs/kernels.py -->\n", "<!-- end of the table -->\n"
CAPABILITIES = (70, 75, 80, 90, 100)  # compute capabilities; a toolkit may lack some
INCLUDED = ("kernels/kernels.h", "reduce/gram.h", "reduce/layout.h", "reduce/tree.h")
TYPES = {
    "f": "float32",
    "d": "float64",
    "6__half": "float16",
    "13__nv_bfloat16": "bfloat16",
}
_ENTRY = re.compile(
    r"Compiling entry function '\w*?(?P<kernel>[A-Z][a-z]+(?:[A-Z][a-z]+)*Kernel)"
    r"(?:I(?P<type>f|d|6__half|13__nv_bfloat16)(?:Li(?P<ranks>\d+)E)?E)?\w*' for 'sm_(?P<for>\d+)'"
    r".*?(?P<spilled>\d+) bytes spill stores.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """The compiled form of one kernel for one compute capability, as ptxas reports it."""

    name: str  # "GramKernel", 8 ranks: "GramKernel<8>"
    dtype: str  # "" if a kernel has none
    capability: int
    registers: int  # per thread
    spilled: int  # bytes


def capabilities(nvcc: Path, candidates: Iterable[int]) -> list[int]:
    """Return the compute capabilities for which `nvcc` compiles.

    Args:
        nvcc: the compiler.
        candidates: compute capabilities times 10, such as 90.
    """
    shown = subprocess.run(
        [str(nvcc), "--list-gpu-code"], capture_output=True, text=True, check=True
    )
    return [number for number in candidates if f"sm_{number}\n" in shown.stdout + "\n"]


def _report_of(source: Path, nvcc: Path, candidates: Iterable[int]) -> str:
    """Return the report of ptxas about a source, cached until the source or a header changes."""
    command = [str(nvcc), "-std=c++17", "-O3", "-fmad=false", "-Werror", "all-warnings"]
    for number in capabilities(nvcc, candidates):
        command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    command += ["--threads", "2", "-Xptxas", "-v", *INCLUDES, "-c", str(source)]
    headers = [native_files()[name] for name in INCLUDED] + list(
        (NATIVE / "cuda").glob("*.h")
    )
    key = hashlib.sha256("\0".join(command).replace(str(NATIVE.parent), "").encode())
    for path in [source, *sorted(headers)]:
        key.update(re.sub(rb"//.*", b"", path.read_bytes()))
    kept = cache_dir() / "tests" / "ptxas" / f"{source.stem}-{key.hexdigest()[:16]}.txt"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        shown = subprocess.run(
            [*command, "-o", "/dev/null"], capture_output=True, text=True, check=False
        )
        if shown.returncode != 0:
            raise RuntimeError(shown.stderr)
        kept.write_text(shown.stdout + shown.stderr)
    return kept.read_text()


def kernels(candidates: Iterable[int] = CAPABILITIES) -> Iterator[Kernel]:
    """Yield every kernel, for each of the compute capabilities that the toolkit has.

    Raises:
        nccl.Missing: nvcc is not installed.
        RuntimeError: a source does not compile, or with a warning.
    """
    nvcc = nccl.cuda_home() / "bin" / "nvcc"
    for source in sorted((NATIVE / "cuda").glob("*.cu")):
        for found in _ENTRY.finditer(_report_of(source, nvcc, candidates)):
            ranks = f"<{found['ranks']}>" if found["ranks"] else ""
            yield Kernel(
                found["kernel"] + ranks,
                TYPES.get(found["type"], ""),
                int(found["for"]),
                int(found["registers"]),
                int(found["spilled"]),
            )


def table(found: list[Kernel]) -> str:
    """Return the table: the most registers over the element types, per compute capability."""
    numbers = sorted({kernel.capability for kernel in found})
    missing = ", ".join(
        f"sm_{number}" for number in CAPABILITIES if number not in numbers
    )
    lines = [
        f"nvcc {nccl.nvcc_version(nccl.cuda_home())}"
        + (f", which does not compile for {missing}" if missing else "")
        + ": registers per thread, the most over the element types.\n",
        "| kernel | " + " | ".join(f"sm_{number}" for number in numbers) + " |",
        "|---" * (1 + len(numbers)) + "|",
    ]
    for name in sorted({kernel.name for kernel in found}):
        most = [
            max(k.registers for k in found if (k.name, k.capability) == (name, number))
            for number in numbers
        ]
        lines.append(f"| `{name}` | " + " | ".join(map(str, most)) + " |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """Return the table in the page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Write the table anew."""
    listed = table(list(kernels()))  # which takes minutes
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + listed + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
