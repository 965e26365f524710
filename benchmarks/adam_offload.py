"""Time of AdamOffload's step on the CPU, torch's own Adams and DeepSpeed's CPUAdam.

    python benchmarks/adam_offload.py               # 25 M and 100 M float32 parameters

Every contender has parameters and state of its own, the gradients are shared. In each
repetition each one takes a step, in an order that rotates. Ratios are to torch's fused Adam in
the same run, those of decoupled weight decay to its fused AdamW: of the medians and, because a
machine may have other work, of the minima. GB/s counts the bytes that Adam must move: it reads
weights, gradients and two moments and writes all but the gradients. DeepSpeed is measured if it
is installed and its extension builds. Before that, every contender's second step is compared
with the float64 definition.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jobs
import numpy as np
import torch

from adasum_hvd.adam_offload import AdamOffload
from adasum_hvd.offload import adam

LR = 1e-3
TENSOR_ELEMENTS = 1_000_000
CHECKED = 1000  # elements of the first tensor
BASELINE = "torch fused"
ADAMW = "torch fused AdamW"
BASELINES = {ADAMW: ADAMW, "AdamOffload decoupled": ADAMW}  # of all others: BASELINE
Params = list[torch.nn.Parameter]


def deepspeed_adam(params: Params, lr: float):
    """Return DeepSpeed's CPUAdam as plain Adam; raises where it does not import or build."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=lr, adamw_mode=False)


# Name -> (class, its settings that the definition has too, all its other ones).
DECAY = {"weight_decay": 0.01}
SCALED = {"loss_scale": 128.0, **DECAY}
DECOUPLED = {"decoupled_weight_decay": True, **DECAY}
QUIET = {"verbose": False}
CONTENDERS: dict[str, tuple[Callable, dict, dict]] = {
    BASELINE: (torch.optim.Adam, {}, {"fused": True}),
    "AdamOffload": (AdamOffload, {}, QUIET),
    "AdamOffload Nesterov": (AdamOffload, {"use_nesterov": True}, QUIET),
    "AdamOffload scaled": (AdamOffload, SCALED, QUIET),
    ADAMW: (torch.optim.AdamW, DECAY, {"fused": True}),
    "AdamOffload decoupled": (AdamOffload, DECOUPLED, QUIET),
    "AdamOffload bfloat16": (AdamOffload, {}, QUIET),
    "torch for-loop": (torch.optim.Adam, {}, {"foreach": False}),
    "DeepSpeed CPUAdam": (deepspeed_adam, {}, {}),
}


class Contender:
    """Parameters of its own and the optimizer that updates them."""

    def __init__(self, name: str, weights: list[torch.Tensor], grads: dict):
        maker, settings, others = CONTENDERS[name]
        dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
        decoupled = {"decoupled_weight_decay": True} if name == ADAMW else {}
        of_torch = {} if maker is AdamOffload else {"torch_eps": True, **decoupled}
        self.settings = {**settings, **of_torch}
        self.params = [torch.nn.Parameter(w.to(dtype, copy=True)) for w in weights]
        for param, grad in zip(self.params, grads[dtype], strict=True):
            param.grad = grad
        self.optimizer = maker(self.params, lr=LR, **settings, **others)
        self.times: list[float] = []

    def verify(self) -> float:
        """Take two steps; return the largest error over the largest weight."""
        param = self.params[0]
        w = param.detach()[:CHECKED].double().numpy()
        g = param.grad[:CHECKED].double().numpy()
        m, v = np.zeros(CHECKED), np.zeros(CHECKED)
        for step in (1, 2):
            self.optimizer.step()
            adam.reference_step(w, g, m, v, step, LR, **self.settings)
        if isinstance(self.optimizer, AdamOffload):
            param = self.optimizer.master(param)
        found = param.detach()[:CHECKED].double().numpy()
        return float(np.abs(found - w).max() / np.abs(w).max())

    def step(self) -> None:
        """Take a step and keep its time."""
        started = time.perf_counter()
        self.optimizer.step()
        self.times.append(time.perf_counter() - started)


def copy_bandwidth(elements: int, repetitions: int) -> float:
    """Return GB/s, read and written, of one tensor's copy into another."""
    source, target = torch.ones(elements), torch.zeros(elements)
    times = []
    for _ in range(repetitions + 1):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return 8 * elements / statistics.median(times[1:]) / 1e9


def measure(names: list[str], millions: int, repetitions: int, slow: int) -> dict:
    """Return one row per contender for so many million parameters."""
    generator = torch.Generator().manual_seed(0)
    shape = (TENSOR_ELEMENTS,)
    weights = [torch.randn(shape, generator=generator) for _ in range(millions)]
    grads32 = [torch.randn(shape, generator=generator) for _ in range(millions)]
    grads = {torch.float32: grads32, torch.bfloat16: [g.bfloat16() for g in grads32]}
    running, rows, obstacles = {}, [], {}
    for name in names:
        try:
            running[name] = Contender(name, weights, grads)
        except Exception as error:
            obstacles[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    errors = {name: contender.verify() for name, contender in running.items()}
    names = list(running)
    for repetition in range(repetitions):
        for offset in range(len(names)):
            name = names[(repetition + offset) % len(names)]
            if name != "torch for-loop" or repetition < slow:
                running[name].step()
    elements = millions * TENSOR_ELEMENTS
    for name, contender in running.items():
        times = np.array(contender.times) * 1e3
        baseline = np.array(running[BASELINES.get(name, BASELINE)].times) * 1e3
        itemsize = contender.params[0].element_size()
        # A master is read and written in addition to the parameter.
        moved = elements * (28 if itemsize == 4 else 24 + 2 * itemsize)
        median = float(np.median(times))
        rows.append(
            {
                "optimizer": name,
                "elements": elements,
                "min_ms": float(times.min()),
                "p50_ms": median,
                "p99_ms": float(np.percentile(times, 99)),
                "max_ms": float(times.max()),
                "gb_per_s": moved / median / 1e6,
                "over_fused": median / float(np.median(baseline)),
                "min_over_fused": float(times.min() / baseline.min()),
                "relative_error": errors[name],
            }
        )
    copy = copy_bandwidth(elements, 10)
    return {"rows": rows, "copy_gb_per_s": copy, "left_out": obstacles}


def show(result: dict) -> None:
    """Print the table of one size."""
    print(
        f"{'optimizer':22s} {'elements':>11s} {'min':>8s} {'p50':>8s} {'p99':>8s} {'max ms':>8s}"
        f" {'GB/s':>6s} {'/ fused':>9s} {'min / min':>9s} {'error':>8s}"
    )
    for row in result["rows"]:
        print(
            f"{row['optimizer']:22s} {row['elements']:11d} {row['min_ms']:8.2f}"
            f" {row['p50_ms']:8.2f} {row['p99_ms']:8.2f} {row['max_ms']:8.2f}"
            f" {row['gb_per_s']:6.1f} {jobs.ratio(row['over_fused']):>9s}"
            f" {jobs.ratio(row['min_over_fused']):>9s}"
            f" {row['relative_error']:8.0e}"
        )
    print(f"copy bandwidth of this machine: {result['copy_gb_per_s']:.1f} GB/s")
    for name, why in result["left_out"].items():
        print(f"left out: {name}: {why}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--optimizers", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS)
    )
    parser.add_argument("--millions", type=int, nargs="+", default=[25, 100])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--slow-repetitions", type=int, default=5, help="for-loop Adam")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--output", type=Path, default=Path("build/adam_offload.json")
    )  # fmt: skip
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = jobs.machine() | {"threads": arguments.threads}
    report = {"machine": machine, "sizes": []}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for millions in arguments.millions:
        baselines = {BASELINES.get(name, BASELINE) for name in arguments.optimizers}
        names = [
            name for name in CONTENDERS if name in {*arguments.optimizers, *baselines}
        ]
        result = measure(
            names, millions, arguments.repetitions, arguments.slow_repetitions
        )
        report["sizes"].append(result)
        show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
