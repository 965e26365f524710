"""Trains with an optimizer on two ranks, in each way, and compares with plain training.

The simulation trains both ranks' copies in one process, and joins gradients or changes by
`adasum_hvd.reference`. Each rank judges its own weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from optimizer_cases import SAVED_AFTER, STEPS, Case, Training, Weights, plain, survey

from adasum_hvd import reference

RANKS = 2
ENGINES = {
    "torchrun": ("reduce_changes", "LocalSGD"),
    "gloo": ("AdasumGrad", "AdasumDelta"),
}
WAYS = (*ENGINES["torchrun"], *ENGINES["gloo"])
_COMPARISONS = (
    ("same data", (0, 0), False),
    ("different data", (0, 1), False),
    ("load_state_dict", (0, 1), True),
)
WINDOW = {"reduce_changes": 1, "LocalSGD": 2, "AdasumDelta": 1}
# A weight may differ by this part of the largest change, or by this many roundings of the
# largest weight, or by 10 times the difference that noise of 1e-6 makes in the simulation.
TOLERANCE, ROUNDINGS, AMPLIFIED = 1e-3, 4 * STEPS, 10.0
_NOISE = 1e-6
# Of the change of weights between steps, an optimizer without a copy leaves at least this part.
LEAST_KEPT = 0.5
# If it leaves more than this part, it computes weights from no copy.
_UNUSED = 0.95
COPY = "keeps a copy of the weights"
RULES = {
    COPY: "keeps them a second time",
    "differentiates gradients": "does not differentiate",
    "takes sparse gradients": "got a sparse one",
    "is no torch.optim.Optimizer": "expected a torch.optim.Optimizer|expected an optimizer, but",
    "has a collective step": "ranks send each other",
}
Batches = tuple[int, int]  # the rank whose batches each rank gets
_FORM = re.compile(r"expected .*but got .*; ", re.DOTALL)


# ---- the simulation ----


def _joined(of_ranks: Sequence[Weights], noise: float) -> Weights:
    generator = torch.Generator().manual_seed(2)  # the optimizer draws from torch's own
    found = []
    for several in zip(*of_ranks, strict=True):
        one = torch.from_numpy(reference.adasum([each.numpy() for each in several]))
        drawn = torch.randn(one.shape, generator=generator, dtype=one.dtype)
        found.append((one * (1 + noise * drawn)).float())
    return found


def simulate_changes(
    case: Case, rank: int, every: int, batches: Batches, resumed: bool, noise: float
) -> list[Weights]:
    """Return a rank's weights after each step if changes are joined after `every` steps."""
    copies, found = [case.build() for _ in range(RANKS)], []
    for number in range(STEPS):
        if resumed and number == SAVED_AFTER:
            copies = [_reloaded(one) for one in copies]
        if number % every == 0:
            start = copies[0].weights()
        for each, one in enumerate(copies):
            one.step(partial(one.backward, batches[each], number), number)
        if number % every == every - 1:
            changes = [
                [new - old for old, new in zip(start, one.weights(), strict=True)]
                for one in copies
            ]
            ends = zip(start, _joined(changes, noise), strict=True)
            end = [old + change for old, change in ends]
            for one in copies:
                one.set_weights(end)
        found.append(copies[rank].weights())
    return found


def simulate_gradients(
    case: Case, rank: int, every: int, batches: Batches, resumed: bool, noise: float
) -> list[Weights]:
    """Return the weights after each step, and after `eval()`, if gradients are joined."""
    training, found = case.build(), []
    for number in range(STEPS):
        if resumed and number == SAVED_AFTER:
            training = _reloaded(training)
        joined = partial(_joined_backward, training, batches, number, noise)
        training.step(joined, number)
        found.append(training.weights())
    return [*found, *_evaluated(training)]


def simulation_of(way: str) -> Callable[..., list[Weights]]:
    """Return the simulation of a way."""
    return simulate_gradients if way == "AdasumGrad" else simulate_changes


def _joined_backward(
    training: Training, batches: Batches, number: int, noise: float
) -> torch.Tensor:
    parameters, losses, of_ranks = list(training.model.parameters()), [], []
    for batch in batches:
        losses.append(training.backward(batch, number).detach())
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in parameters
        ]
        of_ranks.append([one.detach().clone() for one in gradients])
    for p, gradient in zip(parameters, _joined(of_ranks, noise), strict=True):
        p.grad = gradient
    return torch.stack(losses).double().mean()


def _reloaded(training: Training) -> Training:
    saved, new = training.saved(), training.case.build()
    new.load(saved)
    return new


def _evaluated(training: Training) -> list[Weights]:
    """Return the weights of `eval()`, and again after `train()`."""
    if not training.case.evaluates:
        return []
    found = []
    for change in (training.optimizer.eval, training.optimizer.train):
        change()
        found.append(training.weights())
    return found


# ---- the job ----


def train(case: Case, way: str, of: int, resumed: bool = False) -> list[Weights]:
    """Return this rank's weights after each step with the batches of rank `of`. Collective."""
    training, found = wrapped(case, way), []
    for number in range(STEPS):
        if resumed and number == SAVED_AFTER:
            saved, training = training.saved(), wrapped(case, way)
            training.load(saved)
        training.step(partial(training.backward, of, number), number)
        found.append(training.weights())
    return [*found, *(_evaluated(training) if way == "AdasumGrad" else ())]


def wrapped(case: Case, way: str) -> Training:
    """Return a training that reduces. Collective."""
    training = case.build()
    if way in ENGINES["torchrun"]:
        import torch.distributed as dist

        from adasum_hvd.distributed import LocalSGD, reduce_changes

        if way == "reduce_changes":
            reduce_changes(training.optimizer)
        else:
            LocalSGD(training.optimizer, training.model, dist.group.WORLD, WINDOW[way])
    else:
        import adasum_hvd.torch as hvd

        training.optimizer = hvd.DistributedOptimizer(
            training.optimizer,
            training.model.named_parameters(),
            op=getattr(hvd, way),
        )
    return training


def off(actual: list[Weights], expected: list[Weights], start: Weights) -> float:
    """Return the largest difference, as a part of what the tolerance allows without noise."""
    parts = []
    for here, there in zip(actual, expected, strict=True):
        moved, apart = _apart(start, there), _apart(here, there)
        largest = max(one.abs().max().item() for one in there)
        rounding = ROUNDINGS * torch.finfo(torch.float32).eps * largest
        parts.append(apart / (TOLERANCE * moved + rounding))
    return max(part if math.isfinite(part) else math.inf for part in parts)


def _apart(some: Weights, others: Weights) -> float:
    """Return the largest difference; NaN if there is one."""
    pairs = zip(some, others, strict=True)
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()


def judge(case: Case, way: str, rank: int, gather: Callable[[Any], list[Any]]) -> Any:
    """Return this rank's findings: a part of the tolerance for each comparison. Collective.

    Args:
        case: what trains.
        way: one of `WAYS`.
        rank: of this process.
        gather: returns every rank's object.
    """
    start = case.build().weights()
    simulate = simulation_of(way)
    found = {"sensitivity": 0.0}
    for name, batches, resumed in _COMPARISONS:
        if resumed and not case.loads:
            continue
        actual = train(case, way, batches[rank], resumed)
        expected, noisy = (
            simulate(case, rank, WINDOW.get(way, 1), batches, resumed, noise)
            for noise in (0.0, _NOISE)
        )
        if batches == (0, 0):
            expected[:STEPS] = plain(case)
        amplified = AMPLIFIED * off(noisy, expected, start)
        found[name] = off(actual, expected, start) / max(1.0, amplified)
        found["sensitivity"] = max(found["sensitivity"], amplified)
        digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in actual[-1]))
        if len(set(gather(digest.hexdigest()))) > 1:
            found["ranks differ"] = math.inf
    return found


def outcome(case: Case, way: str, rank: int, gather: Callable[[Any], list[Any]]) -> Any:
    """Return what came of a case on all ranks. Collective."""
    try:
        mine = {"found": judge(case, way, rank, gather)}
    except Exception as error:
        mine = {"error": f"{type(error).__name__}: {error}"}
    every = gather(mine)
    errors = [one["error"] for one in every if "error" in one]
    if len(errors) == RANKS:
        return {"verdict": _refusal(case, errors), "error": errors[0][:600]}
    if errors:
        return {"verdict": "unclear: one rank raises", "error": errors[0][:600]}
    names = sorted(set().union(*(one["found"] for one in every)))
    parts = {
        name: round(max(one["found"].get(name, 0.0) for one in every), 4)
        for name in names
    }
    wrong = [n for n, part in parts.items() if part > 1 and n != "sensitivity"]
    verdict = f"silently wrong: {', '.join(wrong)}" if wrong else "right"
    if not wrong and way != "AdasumGrad" and case.keeps < LEAST_KEPT:
        verdict = "silently wrong: undoes the reduction"
    return {"verdict": verdict, "parts": parts}


def _refusal(case: Case, errors: Sequence[str]) -> str:
    if not all(map(_FORM.search, errors)):
        return "unclear: error"
    for rule, words in RULES.items():
        if all(re.search(words, error) for error in errors):
            if rule == COPY and case.keeps > _UNUSED and not case.evaluates:
                rule = "keeps an average of the weights"
            return f"refused: {rule}"
    return "unclear: error"


# ---- processes ----


def _ranks(engine: str) -> tuple[int, Callable[[Any], list[Any]]]:
    if engine == "torchrun":
        import torch.distributed as dist

        dist.init_process_group("gloo")

        def gather(value: Any) -> list[Any]:
            found: list[Any] = [None] * RANKS
            dist.all_gather_object(found, value)
            return found

        return dist.get_rank(), gather
    if engine == "gloo":
        import adasum_hvd.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.allgather_object
    return 0, lambda value: [value]


def main(engine: str, package: str, names: str, output: Path) -> None:
    """Try a package's optimizers; rank 0 appends a line for each begin and each result.

    Args:
        engine: a key of `ENGINES`, or "survey" for plain training by one process.
        package: a key of `optimizer_list.MODULES`.
        names: JSON: names to survey, or the cases to try.
        output: the file.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, gather = _ranks(engine)

    def write(**line: Any) -> None:
        if rank == 0:
            with output.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for item in json.loads(names):
        if engine == "survey":
            write(begins=item)
            write(**survey(package, item))
            continue
        case = Case(**item)
        write(begins=case.name)
        found = {way: outcome(case, way, rank, gather) for way in ENGINES[engine]}
        write(name=case.name, ways=found)
        if any("unclear" in each["verdict"] for each in found.values()):
            break  # ranks may wait for different messages; the next job goes on


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
