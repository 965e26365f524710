"""Does AdaSum keep converging as ranks are added, at a learning rate tuned for one?

    python benchmarks/convergence.py                  # everything, into docs/convergence
    python benchmarks/convergence.py --quick          # a small part, into build/convergence
    python benchmarks/convergence.py --optimizer adam --workers 1,32 --retuned 32 --seeds 3 \
        --ops adasum-grad,adasum-delta --output docs/convergence/adam

LeNet-5 on scikit-learn's digits, after the paper's case study: a fixed number of epochs, 8
images per worker and step (so that a step of 64 workers is 512 of the 1437 images; the
paper's 32 would be more than all of them), momentum 0.9, warm-up over the first 17 % and then
linear to 0. `--batch 32` shows what happens beyond that.
One process plays all workers with the reference (`reference.py`); tests/parallel checks that
real jobs of 4 and 8 processes compute the same. Epochs, batch and the grid of learning rates
are constants below; the sequential rate is chosen on a validation split by a single worker,
before any AdaSum run.

Every run is kept in results.json as soon as it is there, and what is kept is not run again.
The quadratic problem of Horovod's guide is in quadratic.py.
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
from convergence_report import OPS, TARGET, plot, spread, table
from quadratic import quadratic
from torch.nn import functional

from adasum_hvd import reference
from adasum_hvd.tools.torch_digits import LeNet5, digits

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

EPOCHS, MOMENTUM, WARM_UP = 30, 0.9, 0.17
GRIDS = {
    "momentum": (0.003, 0.01, 0.03, 0.1, 0.3),
    "adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
}
WORKERS = (1, 2, 4, 8, 16, 32, 64)
RETUNED = (16, 32, 64)


def schedule(step: int, steps: int, lr: float) -> float:
    """Return the rate of a step: linear up over WARM_UP of all steps, then linear to 0."""
    warm = max(1, round(WARM_UP * steps))
    return lr * min((step + 1) / warm, (steps - step) / max(1, steps - warm))


class Momentum:
    """SGD with momentum; the first axis of `like` are optimizers of their own."""

    def __init__(self, like: tuple[int, ...]):
        self._buffer = np.zeros(like, np.float32)

    def change(self, gradients: np.ndarray, rate: float) -> np.ndarray:
        """Return what a step adds to the weights."""
        self._buffer *= MOMENTUM
        self._buffer += gradients
        return -rate * self._buffer


class Adam(Momentum):
    """Adam with torch's defaults."""

    def __init__(self, like: tuple[int, ...]):
        super().__init__(like)
        self._squares = np.zeros(like, np.float32)
        self._steps = 0

    def change(self, gradients: np.ndarray, rate: float) -> np.ndarray:
        """Return what a step adds to the weights."""
        self._steps += 1
        self._buffer += (1 - 0.9) * (gradients - self._buffer)
        self._squares += (1 - 0.999) * (gradients**2 - self._squares)
        mean = self._buffer / (1 - 0.9**self._steps)
        root = np.sqrt(self._squares / (1 - 0.999**self._steps))
        return -rate * mean / (root + 1e-8)


OPTIMIZERS = {"momentum": Momentum, "adam": Adam}


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
    optimizer: str = "momentum",
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
    # Sum, Average and AdasumGrad have one optimizer; AdasumDelta has one per worker.
    copies = workers if op == "adasum-delta" else 1
    owned = [OPTIMIZERS[optimizer]((copies, *p.shape)) for p in params]
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
            for name, param, kept, own in zip(
                names, params, gradients, owned, strict=True
            ):
                stacked = np.stack(kept)
                if op == "adasum-delta":
                    stacked = own.change(stacked, rate)
                    reduced = change = reduce_workers(stacked, op)
                else:
                    reduced = reduce_workers(stacked, op)
                    change = own.change(reduced[None], rate)[0]
                layers[name] = orthogonality(stacked, reduced)
                param += torch.from_numpy(np.ascontiguousarray(change))
            if (step + 1) % every == 0 or step + 1 == steps:
                result["orthogonality"].append((step + 1, layers))
                hits = model(test_images).argmax(1) == test_labels
                result["accuracy"] = hits.float().mean().item()
                if result["steps_to_target"] is None and result["accuracy"] >= TARGET:
                    result["steps_to_target"] = step + 1
    result["weights"] = [p.detach().numpy() for p in params]
    return result


def best_rate(
    op: str, workers: int, seeds: tuple[int, ...], batch: int, optimizer: str
) -> tuple[float, dict[str, float]]:
    """Return the rate of the grid with the best validation accuracy, and all accuracies."""
    found = {}
    for lr in GRIDS[optimizer]:
        runs = [
            train(op, workers, lr, seed, "validation", batch, optimizer=optimizer)
            for seed in seeds
        ]
        found[str(lr)] = statistics.mean(run["accuracy"] for run in runs)
    return float(max(found, key=lambda key: found[key])), found


class Study:
    """All runs of one optimizer and batch, kept in a file; what it holds is not run again."""

    def __init__(self, path: Path, optimizer: str, batch: int, seeds: tuple[int, ...]):
        self._path, self._seeds = path, seeds
        setting = {"optimizer": optimizer, "epochs": EPOCHS, "batch": batch}
        self.results = {"sequential": [], "retuned": [], "grid": {}, **setting}
        if path.exists():
            self.results |= json.loads(path.read_text())
        kept = {key: self.results[key] for key in setting}
        if kept != setting:
            raise SystemExit(f"{path}: required runs of {setting}, got {kept}")
        if not self.results["grid"]:
            _, self.results["grid"] = best_rate(
                "average", 1, seeds[:2], batch, optimizer
            )

    @property
    def rate(self) -> float:
        """The sequential learning rate."""
        grid = self.results["grid"]
        return float(max(grid, key=lambda key: grid[key]))

    def add(self, kind: str, op: str, workers: int) -> None:
        """Run all seeds at the sequential rate, or with kind "retuned" at the own one."""
        rows = self.results[kind]
        if any((r["op"], r["workers"]) == (op, workers) for r in rows):
            return
        setting = self.results["batch"], self.results["optimizer"]
        lr = self.rate
        if kind == "retuned":
            lr, _ = best_rate(op, workers, self._seeds[:1], *setting)
        for seed in self._seeds:
            run = train(op, workers, lr, seed, "test", setting[0], optimizer=setting[1])
            del run["weights"]
            rows.append({"op": op, "workers": workers, "seed": seed, "lr": lr, **run})
        rows.sort(key=lambda r: (r["workers"], OPS.index(r["op"]), r["seed"]))
        accuracies = [
            r["accuracy"] for r in rows if (r["op"], r["workers"]) == (op, workers)
        ]
        print(
            f"{workers:3d} workers {op:13s} {spread(accuracies)} at {lr:g}", flush=True
        )
        self.write()

    def write(self) -> None:
        """Write what there is."""
        self.results["machine"] = jobs.machine()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.results))

    def report(self) -> str:
        """Return the tables."""
        results = self.results
        text = [f"{EPOCHS} epochs, {results['batch']} images per worker and step, "
                f"{results['optimizer']}.", ""]  # fmt: skip
        text += [table(results["sequential"], f"At the sequential rate, {self.rate:g}")]
        if results["retuned"]:
            text += ["", table(results["retuned"], "Rate retuned per reduction")]
        if results.get("quadratic"):
            text += ["", "### Quadratic problem of Horovod's guide", ""]
            text += [
                "| x_max | workers | reduction | best lr | steps |",
                "|---" * 5 + "|",
            ]
            text += [f"| {r['x_max']:g} | {r['workers']} | {r['op']} | {r['lr']:g} "
                     f"| {r['steps']:.1f} |" for r in results["quadratic"]]  # fmt: skip
        return "\n".join(text) + "\n"


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as "1,16"."""
    return tuple(int(word) for word in text.split(",") if word)


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="2 seeds, 1 and 16 workers"
    )
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="momentum")
    parser.add_argument("--workers", type=numbers, default=WORKERS)
    parser.add_argument(
        "--retuned", type=numbers, default=RETUNED, help="also tuned at"
    )
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--batch", type=int, default=8, help="images per worker and step"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/convergence"))
    return parser


def main() -> None:
    """Run the command line."""
    arguments = make_parser().parse_args()
    if arguments.quick:
        arguments.workers, arguments.retuned, arguments.seeds = (1, 16), (), 2
        arguments.output = Path("build/convergence")
    torch.set_num_threads(1)
    study = Study(
        arguments.output / "results.json",
        arguments.optimizer,
        arguments.batch,
        tuple(range(1, arguments.seeds + 1)),
    )
    for workers in arguments.workers:
        # With one worker all reductions are the same.
        for op in arguments.ops.split(",") if workers > 1 else OPS[-1:]:
            study.add("sequential", op, workers)
    for workers in arguments.retuned:
        for op in arguments.ops.split(","):
            study.add("retuned", op, workers)
    if "quadratic" not in study.results and arguments.optimizer == "momentum":
        study.results["quadratic"] = quadratic(arguments.quick)
        study.write()
    (arguments.output / "table.md").write_text(study.report())
    plot(study.results["sequential"], arguments.output / "convergence.png")
    print(study.report())


if __name__ == "__main__":
    main()
