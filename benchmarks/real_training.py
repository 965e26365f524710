"""Study 7's runs with real processes: the same accuracy as its simulation, and the time they take.

    python benchmarks/real_training.py                  # 8 processes, 2 seeds
    python benchmarks/real_training.py --workers 32 --seeds 1 --works digits

Each rank is a worker of the study: same weights, same examples, same rates, same schedule. The
clock runs while steps are taken, not while the first rank judges them. The predictions for
clusters combine the steps to the target, a worker's processor time per step, and
`cost_model.py`: one worker per host, a ring average for Average, the op's levels for AdasumGrad.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cost_model
import jobs
import torch
from convergence import plan
from convergence.runs import Runs
from convergence.target import judged_steps, reaches
from convergence.target_report import Results
from convergence.training import OPTIMIZERS, Setting
from convergence.tuning import rate
from convergence.workloads import workload

from adasum_hvd.base import ops

TASKS = {task.work: task for task in (plan.DIGITS, plan.GPT_SMALL)}
OUTPUT = jobs.REPOSITORY / "docs/convergence"
METHODS = ("average", "adasum-grad")
GIGABITS = (1, 10, 100)
LATENCY_SECONDS = 50e-6  # between hosts, over TCP


def train_for_real(setting: Setting) -> dict[str, Any]:
    """Return the first rank's record of one run. Collective."""
    import adasum_hvd.torch as hvd

    torch.manual_seed(setting.seed)
    work = workload(setting.work, setting.split)
    model = work.model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[setting.optimizer](list(model.parameters())),
        model.named_parameters(),
        op=ops.parse(setting.op),
    )
    horizon = work.steps(setting.budget, work.batch, setting.workers)
    judged = judged_steps(max(horizon, setting.most_steps), horizon)
    draws = work.draws(setting.seed, hvd.size(), work.batch)
    record: dict[str, Any] = {"steps_to_target": None, "seconds_to_target": None}
    seconds, level = 0.0, math.nan
    for step in range(1, horizon + 1):
        inputs, targets = (found[hvd.rank()] for found in next(draws))
        warm = step / max(1, round(setting.warm_up * horizon))
        optimizer.param_groups[0]["lr"] = setting.lr * min(1.0, warm)
        hvd.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        work.loss(model(inputs), targets).backward()
        optimizer.step()
        seconds += time.perf_counter() - began
        if step in judged and hvd.rank() == 0:
            level = round(work.level(model), 5)
            if record["steps_to_target"] is None and reaches(level, setting.target):
                record |= {
                    "steps_to_target": step,
                    "seconds_to_target": round(seconds, 3),
                }
    return record | {"horizon": horizon, "level": level, "seconds": round(seconds, 3)}


def rank_main(settings: str, output: Path) -> None:
    """Train every setting as one rank; the first rank writes the records."""
    import adasum_hvd.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    records = [train_for_real(Setting(**each)) for each in json.loads(settings)]
    if hvd.rank() == 0:
        output.write_text(json.dumps(records))
    hvd.shutdown()


def simulated(work: str, workers: int, seeds: int) -> list[dict[str, Any]]:
    """Return study 7's records of its first test seeds, at each method's own rate.

    Raises:
        SystemExit: the study has no results for this number of workers.
    """
    results = Results(Runs(OUTPUT / "raw", "none", only_kept=True), plan.SEEDS["small"])
    found = []
    for method in METHODS:
        point = plan.Point(TASKS[work], method, workers)
        outcome = results.tuned(point)
        if outcome is None:
            raise SystemExit(
                f"real_training: expected study 7's results of {method} for {workers} workers, "
                "but got none; run `python benchmarks/convergence steps_to_target`"
            )
        found += [
            {"setting": replace(point.setting, lr=rate(outcome.index), seed=seed), **r}
            for seed, r in zip(
                results.seeds.test[:seeds], outcome.records, strict=False
            )
        ]
    return found


def step_seconds(runs: Runs) -> float:
    """Return a worker's processor time for one step: of study 7's runs of one worker."""
    alone = [
        r["seconds"] / r["steps"]
        for r in runs.all()
        if r.get("target") and (r["work"], r["workers"]) == ("digits", 1)
    ]
    return statistics.median(alone)


def predicted(workers: int, method: str, n: float, gigabits: float) -> float:
    """Return the seconds of a reduction of `n` bytes over as many hosts, by the cost model."""
    machine = cost_model.Machine(
        1, 2e-6, 10e9, LATENCY_SECONDS, gigabits / 8 * 1e9, 6e9
    )
    if method == "average":
        return cost_model.ring_seconds(machine, workers, n)
    levels = cost_model.planned_levels(machine, workers)
    return cost_model.levels_seconds(machine, levels, n)


def predictions(counts: list[int]) -> list[dict[str, Any]]:
    """Return rows of the time to the target on clusters, for counts that study 7 has."""
    runs = Runs(OUTPUT / "raw", "none", only_kept=True)
    results = Results(runs, plan.SEEDS["small"])
    weights = sum(p.numel() for p in workload("digits", "test").model().parameters())
    alone, rows = step_seconds(runs), []
    for workers, method in itertools.product(counts, METHODS):
        point = plan.Point(plan.DIGITS, method, workers)
        for at, of in (("its own", results.tuned), ("one worker's", results.carried)):
            outcome = of(point)
            if outcome is None or len(outcome.steps) < len(outcome.records):
                continue  # a seed missed the target
            steps = statistics.mean(outcome.steps)
            seconds = {
                str(speed): round(
                    steps * (alone + predicted(workers, method, 4.0 * weights, speed)),
                    3,
                )
                for speed in GIGABITS
            }
            row = {"workers": workers, "method": method, "rate": at, "steps": steps}
            rows.append(row | {"seconds": seconds})
    return rows


def main() -> None:
    """Run the jobs, compare them with the simulation, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--works", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--output", type=Path, default=OUTPUT / "real.json")
    arguments = parser.parse_args()
    expected = [
        each
        for work in arguments.works
        for each in simulated(work, arguments.workers, arguments.seeds)
    ]
    settings = [asdict(each["setting"]) for each in expected]
    records = jobs.run("gloo", arguments.workers, __file__, json.dumps(settings))
    rows = []
    for setting, simulation, real in zip(settings, expected, records, strict=True):
        rows.append({
            "work": setting["work"], "method": setting["op"], "workers": setting["workers"],
            "lr": setting["lr"], "seed": setting["seed"], **real,
            "simulated": {k: simulation[k] for k in ("steps_to_target", "level")},
        })  # fmt: skip
        print(rows[-1])
    alone = step_seconds(Runs(OUTPUT / "raw", "none", only_kept=True))
    found = {"machine": jobs.machine(), "rows": rows, "step_seconds": round(alone, 6)}
    found["predicted"] = predictions([8, 32])
    for row in found["predicted"]:
        print(row)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
