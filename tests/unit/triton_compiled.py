"""Compiles the kernels for a GPU without one: python -m tests.unit.triton_compiled DTYPE RANKS.

Prints a line of JSON per kernel: what it is, its registers and the bytes that it spills. The
arguments are those with which `DeviceSlice` starts them.
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
from triton.compiler import ASTSource

from adasum_hvd.distributed import device_slice
from adasum_hvd.distributed.coefficients import tree_of
from adasum_hvd.distributed.device_slice import DeviceSlice
from adasum_hvd.distributed.slices import layout_of

TARGET = GPUTarget("cuda", 90, 32)
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
    torch.float64: "fp64", torch.int64: "i64", torch.int32: "i32", torch.int8: "i8",
}  # fmt: skip


def type_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    return f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"


class Compiled(DeviceSlice):
    """Compiles where a slice starts a kernel."""

    def _start(self, kernel: Any, *words: Any, **constants: Any) -> None:
        constants["width"] = self._width
        names = kernel.arg_names
        signature = dict(zip(names, map(type_of, words), strict=False))
        signature |= dict.fromkeys(constants, "constexpr")
        assert list(signature) == names or set(signature) == set(names)
        source = ASTSource(kernel, {name: signature[name] for name in names}, constants)
        made = triton.compile(source, target=TARGET, options=device_slice.OPTIONS)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(made.asm["ptx"])
            file.flush()
            words = [str(PTXAS), "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
            report = subprocess.run(words, capture_output=True, text=True, check=True)
        found = {
            "kernel": kernel.__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "ranks": len(self._rows),
            "registers": int(re.search(r"Used (\d+) registers", report.stderr)[1]),
            "spilled": int(re.search(r"(\d+) bytes spill stores", report.stderr)[1]),
            "wide": len(re.findall(r"ld\.global\S*\.v[24]\.b", made.asm["ptx"])),
            "fused": made.asm["ptx"].count("fma.rn.f64"),
        }
        print(json.dumps(found), flush=True)


def main(dtype: str, ranks: int) -> None:
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
        part.node_products(tree, sides[:tier], None, cancelled, None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
