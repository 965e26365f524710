"""Compiles the kernels for a GPU without one: python -m tests.unit.triton_compiled DTYPE RANKS.

Prints a line of JSON per kernel: what it is, its registers, and its bytes of stack, to which it
spills more of them. The arguments are those with which `DeviceSlice` starts them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from adasum_hvd.distributed import device_slice
from adasum_hvd.distributed.coefficients import tree_of
from adasum_hvd.distributed.device_slice import DeviceSlice
from adasum_hvd.distributed.slices import layout_of

TARGET = GPUTarget("cuda", 90, 32)
PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Driver:
    """An H100 that is not there: enough for Triton to compile what is started."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled(DeviceSlice):
    """Compiles where a slice starts a kernel."""

    def _start(self, kernel: Any, *words: Any, **constants: Any) -> None:
        constants |= {"width": self._width, **device_slice.OPTIONS}
        made = kernel.warmup(*words, **constants, grid=(1,))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            words = [str(PROGRAMS / "cuobjdump"), "-res-usage", file.name]
            usage = subprocess.run(words, capture_output=True, text=True, check=True)
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
        found = {
            "kernel": kernel.__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "ranks": len(self._rows),
            "registers": int(registers),
            "stack": int(stack),
            "wide": len(re.findall(r"ld\.global\S*\.v[24]\.b", made.asm["ptx"])),
            "fused": made.asm["ptx"].count("fma.rn.f64"),
        }
        print(json.dumps(found), flush=True)


def main(dtype: str, ranks: int) -> None:
    triton.runtime.driver.set_active(Driver())
    rows = [torch.ones(10, dtype=getattr(torch, dtype)) for _ in range(ranks)]
    part = Compiled(rows, layout_of((10,), 1).runs[0])
    tree = tree_of((0,) * ranks, "adasum", 0)
    ones = torch.ones(1, ranks, dtype=torch.float64)
    scaled = dtype == "float64"
    part.gram(ones if scaled else None)
    part.combine(tree, ones, ones[:, 0] if scaled else None, rows[0])
    if scaled:
        part.largest()
    sides = [torch.ones(1, len(tier.left), 2).double() for tier in tree.tiers]
    for tier in range(1, len(sides)):
        cancelled = torch.ones(1, dtype=torch.bool)
        part.node_products(tree, sides[:tier], None, cancelled)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
