"""The trial of optimizers: its page, its judgement, and that a stopped job does not end it."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import optimizer_cases
import optimizer_list
import optimizer_page
import optimizer_trial
import optimizers
import pytest
import torch
from optimizer_cases import STEPS, Case


def twice(value):
    """Gather as a job of two ranks that are equal."""
    return [value, value]


class Master(torch.optim.SGD):
    """Keeps a copy of the weights."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.clone())
            p.copy_(master.sub_(p.grad, alpha=0.1))


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no step")


@pytest.fixture
def package(monkeypatch):
    """A package of the trial with the optimizers above."""
    module = ModuleType("optimizers_of_a_test")
    vars(module).update(Master=Master, Fails=Fails)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(optimizer_list.MODULES, "test", module.__name__)
    return "test"


def test_the_page_is_what_the_results_generate():
    found = json.loads(optimizers.OUTPUT.read_text())
    assert optimizer_page.PAGE.read_text() == optimizer_page.page(found)
    assert optimizers.OUTPUT.read_text() == optimizer_page.encoded(found)
    assert set(found["versions"]) == set(optimizer_list.MODULES)


def test_every_pinned_package_is_in_the_results():
    pins = Path(optimizers.jobs.REPOSITORY, "pyproject.toml").read_text()
    versions = json.loads(optimizers.OUTPUT.read_text())["versions"]
    for package, version in versions.items():
        pin = rf'"{re.escape(package)}=={re.escape(version.partition("+")[0])}[";]'
        assert re.search(pin, pins), pin


def test_a_survey_tells_how_plain_training_runs(package):
    adam = optimizer_cases.survey("torch", "Adam")
    assert (adam["shape"], adam["call"], adam["loads"]) == ("layers", "backward", True)
    assert adam["keeps"] == pytest.approx(1, abs=0.01)
    assert optimizer_cases.survey("torch", "LBFGS")["call"] == "closure"
    assert optimizer_cases.survey("torch", "SparseAdam")["shape"] == "embedding"
    assert optimizer_cases.survey("torch", "Muon")["shape"] == "matrices"
    master = optimizer_cases.survey(package, "Master")
    assert master["keeps"] == pytest.approx(0, abs=0.01)
    assert optimizer_cases.survey(package, "Fails")["error"] == "RuntimeError: no step"
    assert optimizer_list.names_of(package) == ["Fails", "Master"]


@pytest.mark.parametrize("way", optimizer_trial.WAYS)
def test_simulations_of_the_same_data_are_plain_training(way):
    case = Case("torch", "AdamW", "layers", "backward")
    simulate = optimizer_trial.simulation_of(way)
    start, every = case.build().weights(), optimizer_trial.WINDOW.get(way, 1)
    same, others = (
        simulate(case, 0, every, batches, False, 0.0) for batches in ((0, 0), (0, 1))
    )
    plain = optimizer_cases.plain(case)
    assert optimizer_trial.off(same, plain, start) < 0.1
    assert optimizer_trial.off(others, plain, start) > 1
    spoilt = [[one * math.nan for one in each] for each in plain]
    assert optimizer_trial.off(spoilt, plain, start) == math.inf


def outcome(monkeypatch, case, train):
    monkeypatch.setattr(optimizer_trial, "train", train)
    return optimizer_trial.outcome(case, "reduce_changes", 0, twice)["verdict"]


def test_verdicts(monkeypatch):
    case = Case("torch", "SGD", "layers", "backward")
    copying = Case("torch", "SGD", "layers", "backward", keeps=0.0)

    def raising(message):
        def train(*_):
            raise RuntimeError(message)

        return train

    form = "expected one thing, but got {}; do another"
    for message, expected in (
        ("no form", "unclear: error"),
        (form.format("another"), "unclear: error"),
        (form.format("a sparse one"), "refused: takes sparse gradients"),
    ):
        assert outcome(monkeypatch, case, raising(message)) == expected
    copy = raising(form.format("an Adam that keeps them a second time"))
    assert outcome(monkeypatch, copying, copy) == f"refused: {optimizer_trial.COPY}"
    average = "refused: keeps an average of the weights"
    assert outcome(monkeypatch, case, copy) == average

    def unreduced(case, way, of, resumed=False):
        return optimizer_cases.plain(case, resumed)

    wrong = "silently wrong: different data, load_state_dict"
    assert outcome(monkeypatch, case, unreduced) == wrong


def test_a_job_that_stops_is_recorded_and_another_one_goes_on(monkeypatch):
    ends = iter(["timed out", "crashed", "ended"])

    def run(engine, package, items, output):
        how, lines = next(ends), []
        for item in items:
            lines.append({"begins": item})
            if how != "ended" and item in ("b", "c"):
                break
            lines.append({"name": item})
        output.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return how

    monkeypatch.setattr(optimizers, "_run", run)
    lines = optimizers.walk("survey", "torch", ["a", "b", "c", "d"])
    assert [(line["name"], line.get("error")) for line in lines] == [
        ("a", None),
        ("b", "timed out"),
        ("c", "crashed"),
        ("d", None),
    ]


def test_steps_cover_a_checkpoint_between_windows():
    for every in optimizer_trial.WINDOW.values():
        assert optimizer_cases.SAVED_AFTER % every == STEPS % every == 0
