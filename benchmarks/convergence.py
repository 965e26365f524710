"""Does AdaSum keep converging as ranks are added, at a learning rate tuned for one?

    python benchmarks/convergence.py                  # everything, into docs/convergence
    python benchmarks/convergence.py --quick          # a small part, to see that it runs

LeNet-5 on scikit-learn's digits, after the paper's case study: a fixed number of epochs, 8
images per worker and step (so that a step of 64 workers is 512 of the 1437 images; the
paper's 32 would be more than all of them), momentum 0.9, warm-up over the first 17 % and then
linear to 0. `--batch 32` shows what happens beyond that.
One process plays all workers with the reference (`reference.py`); tests/parallel checks that
real jobs of 4 and 8 processes compute the same. Epochs, batch and the grid of learning rates
are constants below; the sequential rate is chosen on a validation split by a single worker,
before any AdaSum run.

The quadratic problem is that of Horovod's AdaSum guide: y = x^2 - 20 x + 50, model
x^2 + p0 x + p1, p = (1, -1), one sample per worker and step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import numpy as np
import torch
from torch.nn import functional

from adasum_hvd import reference

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from torch_digits import LeNet5, digits

EPOCHS, MOMENTUM, WARM_UP, TARGET = 30, 0.9, 0.17, 0.95
GRID = (0.003, 0.01, 0.03, 0.1, 0.3)
OPS = ("sum", "average", "adasum-grad", "adasum-delta")
WORKERS = (1, 2, 4, 8, 16, 32, 64)
SEEDS = (1, 2, 3, 4, 5)


def schedule(step: int, steps: int, lr: float) -> float:
    """Return the rate of a step: linear up over WARM_UP of all steps, then linear to 0."""
    warm = max(1, round(WARM_UP * steps))
    return lr * min((step + 1) / warm, (steps - step) / max(1, steps - warm))


def reduce_workers(stacked: np.ndarray, op: str) -> np.ndarray:
    """Return the reduction over the first axis, in float32."""
    if op == "sum":
        return stacked.sum(0)
    if op == "average":
        return stacked.mean(0)
    return reference.adasum(list(stacked)).astype(np.float32)


def orthogonality(stacked: np.ndarray, reduced: np.ndarray) -> float:
    """Return |AdaSum|^2 / sum |g_i|^2: 1 where all are orthogonal, 1/N where parallel."""
    total = float(np.sum(stacked.astype(np.float64) ** 2))
    squared = float(np.sum(reduced.astype(np.float64) ** 2))
    return round(squared / total, 4) if total else 0.0


def batches(seed: int, images: int, batch: int) -> Iterator[torch.Tensor]:
    """Yield the indices of one worker's batch after the other's, step after step, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        yield torch.from_numpy(rng.choice(images, batch, replace=False))


def train(
    op: str,
    workers: int,
    lr: float,
    seed: int,
    split: str,
    batch: int,
    limit: int | None = None,
) -> dict:
    """Train LeNet-5 with all workers in this process and return what came out.

    `limit` ends the training after that many steps of the schedule.
    """
    train_images, train_labels, test_images, test_labels = digits()
    if split == "validation":
        test_images, test_labels = train_images[-237:], train_labels[-237:]
        train_images, train_labels = train_images[:-237], train_labels[:-237]
    torch.manual_seed(seed)
    model = LeNet5()
    names, params = zip(*model.named_parameters(), strict=True)
    draws = batches(seed, len(train_images), batch)
    steps = max(1, EPOCHS * len(train_images) // (batch * workers))
    # Sum, Average and AdasumGrad share one momentum; AdasumDelta has one per worker.
    momenta = [np.zeros((workers if op == "adasum-delta" else 1, *p.shape), np.float32)
               for p in params]  # fmt: skip
    result: dict = {"steps": steps, "steps_to_target": None, "orthogonality": []}
    every = max(1, steps // 20)
    for step in range(min(steps, limit or steps)):
        rate = schedule(step, steps, lr)
        gradients: list[list[np.ndarray]] = [[] for _ in params]
        for _ in range(workers):
            chosen = next(draws)
            loss = functional.cross_entropy(
                model(train_images[chosen]), train_labels[chosen]
            )
            for kept, gradient in zip(
                gradients, torch.autograd.grad(loss, params), strict=True
            ):
                kept.append(gradient.numpy())
        layers = {}
        with torch.no_grad():
            for name, param, kept, momentum in zip(
                names, params, gradients, momenta, strict=True
            ):
                stacked = np.stack(kept)
                if op == "adasum-delta":
                    momentum *= MOMENTUM
                    momentum += stacked
                    stacked = -rate * momentum
                    change = reduce_workers(stacked, op)
                    layers[name] = orthogonality(stacked, change)
                else:
                    reduced = reduce_workers(stacked, op)
                    layers[name] = orthogonality(stacked, reduced)
                    momentum *= MOMENTUM
                    momentum += reduced
                    change = -rate * momentum[0]
                param += torch.from_numpy(np.ascontiguousarray(change))
            if (step + 1) % every == 0 or step + 1 == steps:
                result["orthogonality"].append((step + 1, layers))
                hits = model(test_images).argmax(1) == test_labels
                result["accuracy"] = hits.float().mean().item()
                if result["steps_to_target"] is None and result["accuracy"] >= TARGET:
                    result["steps_to_target"] = step + 1
    result["weights"] = [p.detach().numpy() for p in params]
    return result


def trained(
    op: str, workers: int, lr: float, seeds: tuple[int, ...], batch: int
) -> list[dict]:
    """Return one row per seed: the settings and what :func:`train` measured on the test set."""
    rows = []
    for seed in seeds:
        run = train(op, workers, lr, seed, "test", batch)
        del run["weights"]
        rows.append({"op": op, "workers": workers, "seed": seed, "lr": lr, **run})
    return rows


def best_rate(
    op: str, workers: int, seeds: tuple[int, ...], batch: int
) -> tuple[float, dict[str, float]]:
    """Return the rate of GRID with the best validation accuracy, and all accuracies."""
    found = {}
    for lr in GRID:
        runs = [
            train(op, workers, lr, seed, "validation", batch)["accuracy"]
            for seed in seeds
        ]
        found[str(lr)] = statistics.mean(runs)
    return float(max(found, key=lambda key: found[key])), found


# ---- the quadratic problem ----


def quadratic_steps(workers: int, x_max: float, lr: float, seed: int, op: str) -> int:
    """Return the steps until both gradients are 0 twice running; 100 when 50 do not do.

    The guide computes in float32, where they become exactly 0; here, in float64, 1e-7 is 0.
    """
    generators = [np.random.default_rng([seed, 1 + rank]) for rank in range(workers)]
    p, still = np.array([1.0, -1.0]), 0
    for step in range(1, 51):
        gradients = []
        for generator in generators:
            x = generator.uniform(-x_max, x_max)
            error = (p[0] * x + p[1]) - (-20 * x + 50)
            gradients.append(np.array([2 * error * x, 2 * error]))
        reduced = (
            np.mean(gradients, 0) if op == "average" else reference.adasum(gradients)
        )
        still = still + 1 if np.all(np.abs(reduced) < 1e-7) else 0
        if still == 2:
            return step
        p = p - lr * reduced
        if not np.all(np.isfinite(p)):
            return 100
    return 100


def quadratic(quick: bool) -> list[dict]:
    """Sweep workers, x_max and learning rates; return the best rate of each."""
    rows = []
    rates = np.arange(0.10, 1.595, 0.1 if quick else 0.01)
    seeds = range(2 if quick else 10)
    for x_max in (1.0, 2.0):
        for workers in (1, 2, 4, 8, 16):
            for op in ("average", "adasum"):
                means = [
                    statistics.mean(
                        quadratic_steps(workers, x_max, lr, seed, op) for seed in seeds
                    )
                    for lr in rates
                ]
                best = int(np.argmin(means))
                rows.append({"x_max": x_max, "workers": workers, "op": op,
                             "lr": round(float(rates[best]), 2), "steps": means[best]})  # fmt: skip
    return rows


# ---- the report ----


def spread(values: list[float]) -> str:
    """Return mean and standard deviation, in percent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):5.1f} +- {100 * deviation:4.1f}"


def cell(runs: list[dict]) -> str:
    """Return what the table says of the runs of one reduction at one number of workers."""
    reached = [r["steps_to_target"] for r in runs if r["steps_to_target"]]
    when = f"{statistics.mean(reached):.0f} ({len(reached)})" if reached else "never"
    return (
        f"{spread([r['accuracy'] for r in runs])}; lr {runs[0]['lr']:g}; "
        f"{100 * TARGET:.0f} % at {when}"
    )


def table(results: list[dict], title: str) -> str:
    """Return one Markdown table: workers down, reductions across.

    A cell is the accuracy over the seeds, the learning rate, and the mean of the steps to
    TARGET over the seeds that reached it, with their number.
    """
    lines = [f"### {title}", "", "| workers | steps | " + " | ".join(OPS) + " |"]
    lines.append("|---" * (2 + len(OPS)) + "|")
    for workers in sorted({r["workers"] for r in results}):
        cells, steps = [], 0
        for op in OPS:
            runs = [r for r in results if r["workers"] == workers and r["op"] == op]
            steps = runs[0]["steps"] if runs else steps
            cells.append(cell(runs) if runs else "")
        lines.append(f"| {workers} | {steps} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: list[dict], output: Path) -> None:
    """Draw accuracy over workers, and AdaSum's orthogonality over time per layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for op in OPS:
        runs = [r for r in results if r["op"] == op]
        counts = sorted({r["workers"] for r in runs})
        means = [
            statistics.mean(r["accuracy"] for r in runs if r["workers"] == n)
            for n in counts
        ]
        left.plot(counts, means, "o-", label=op)
    left.set_xscale("log", base=2)
    left.set(xlabel="workers", ylabel="test accuracy", title="sequential learning rate")
    left.legend()
    most = max(r["workers"] for r in results)
    run = next(r for r in results if r["op"] == "adasum-delta" and r["workers"] == most)
    for layer in run["orthogonality"][0][1]:
        if layer.endswith("weight"):
            points = [(step, layers[layer]) for step, layers in run["orthogonality"]]
            right.plot(*zip(*points, strict=True), label=layer)
    right.set(
        xlabel="step",
        ylabel="|AdaSum|^2 / sum |delta_i|^2",
        title=f"{most} workers, delta",
    )
    right.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=110)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 seeds, 2 worker counts")
    parser.add_argument(
        "--no-retuned", action="store_true", help="only the sequential rate"
    )
    parser.add_argument(
        "--batch", type=int, default=8, help="images per worker and step"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/convergence"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workers_list, seeds = ((1, 16), SEEDS[:2]) if arguments.quick else (WORKERS, SEEDS)
    lr, grid = best_rate("average", 1, seeds[:2], arguments.batch)
    print(
        f"sequential learning rate {lr:g}, by validation accuracy: {grid}", flush=True
    )
    fixed, retuned = [], []
    for workers in workers_list:
        # With one worker all reductions are the same.
        for op in OPS if workers > 1 else OPS[-1:]:
            runs = trained(op, workers, lr, seeds, arguments.batch)
            fixed += runs
            accuracies = [run["accuracy"] for run in runs]
            print(f"{workers:3d} workers {op:13s} {spread(accuracies)}", flush=True)
    for workers in () if arguments.no_retuned else workers_list[-2:]:
        for op in OPS:
            own, _ = best_rate(op, workers, seeds[:1], arguments.batch)
            runs = trained(op, workers, own, seeds, arguments.batch)
            retuned += runs
            last = [run["accuracy"] for run in runs]
            print(
                f"{workers:3d} workers {op:13s} {spread(last)} at its own {own:g}",
                flush=True,
            )
    rows = quadratic(arguments.quick)
    text = [f"{EPOCHS} epochs, {arguments.batch} images per worker and step.", ""]
    text += [table(fixed, f"At the sequential learning rate, {lr:g}"), ""]
    if retuned:
        text += [table(retuned, "Learning rate retuned per reduction"), ""]
    text += ["### Quadratic problem of Horovod's guide", ""]
    text += [
        "| x_max | workers | reduction | best lr | steps |",
        "|---|---|---|---|---|",
    ]
    text += [f"| {r['x_max']:g} | {r['workers']} | {r['op']} | {r['lr']:g} | {r['steps']:.1f} |"
             for r in rows]  # fmt: skip
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "table.md").write_text("\n".join(text) + "\n")
    (arguments.output / "results.json").write_text(
        json.dumps(
            {
                "machine": jobs.machine(),
                "sequential": fixed,
                "retuned": retuned,
                "grid": grid,
                "quadratic": rows,
                "epochs": EPOCHS,
                "batch": arguments.batch,
            }
        )
    )
    plot(fixed, arguments.output / "convergence.png")
    print("\n".join(text))


if __name__ == "__main__":
    main()
