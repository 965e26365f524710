"""Study 7: the tuning of rates, runs that were killed, and what the pages say of the runs."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from convergence import (
    advice_report,
    changing,
    glyphs,
    local_outer,
    outer_report,
    plan,
    program,
    runs,
    schedule,
    target,
    target_report,
    training,
    tuning,
    workloads,
)
from convergence.training import Setting, train

CONVERGENCE = Path(__file__).parents[2] / "docs/convergence"
POINT = Setting("digits", "momentum", "average", 4, 0.0, 1, target=0.9)
TEXT = Setting("gpt-tiny", "adamw", "average", 4, 0.01, 2**11, seed=7)
TINY = replace(TEXT, target=5.0, most_steps=20, warm_up=0.05)
SGD = replace(POINT, lr=0.05)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors on several threads wait for a busy machine; the studies have one, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def found_by(steps: dict[int, int | None]) -> tuning.Find:
    """Return what a search finds if a rate's steps to the target are these; else it diverged."""
    at = {tuning.rate(index): value for index, value in steps.items()}

    def find(setting: Setting) -> tuning.Record:
        count = at.get(setting.lr)
        return {"steps_to_target": count, "steps": 100, "level": count and 0.9}

    return find


def searched(start: int, seeds: tuning.Seeds, find: tuning.Find) -> int | None:
    def candidates(index: int) -> list[Setting]:
        return tuning.tried(POINT, index, seeds)

    return tuning.followed(
        tuning.tune(candidates, tuning.cost, tuning.around(start), find), find
    )


def test_a_grid_is_extended_until_its_best_is_not_at_an_end():
    find = found_by({index: 10 + abs(index + 4) for index in range(-9, 3)})
    settings: list[Setting] = []

    def seen(setting: Setting) -> tuning.Record:
        settings.append(setting)
        return find(setting) or {}

    best = searched(0, tuning.Seeds(), seen)
    assert best == -4
    rates = {setting.lr for setting in settings}
    assert rates == {tuning.rate(index) for index in range(-5, 2)}
    assert {setting.split for setting in settings} == {"validation"}


def test_a_search_without_a_best_rate_ends():
    runaway = found_by({index: 100 - index for index in range(0, 90)})
    seeds = tuning.Seeds((101,), (1,))
    assert searched(0, seeds, runaway) == 12
    assert searched(5, seeds, found_by({})) is not None
    # All of the first three rates miss, and the best is not next to them.
    assert searched(0, seeds, found_by({-4: 30, -5: 20, -6: 25})) == -5


def test_a_missed_target_counts_as_twice_the_steps():
    reached = {"steps_to_target": 10, "steps": 40, "level": 0.9}
    missed = {"steps_to_target": None, "steps": 40, "level": 0.5}
    early = {"steps_to_target": None, "steps": 3, "most_steps": 40, "level": None}
    assert tuning.cost([reached, missed]).steps == 45
    assert tuning.cost([missed]) < tuning.cost([early])
    assert tuning.cost([missed]).steps == tuning.cost([early]).steps


def test_no_test_seed_tunes():
    for seeds in (*plan.SEEDS.values(), tuning.Seeds()):
        assert not set(seeds.tuning) & set(seeds.test)
    assert len(tuning.TUNING_SEEDS) == 3 and len(tuning.TEST_SEEDS) == 5
    settings = tuning.tried(POINT, 0, tuning.Seeds())
    settings += tuning.tested(POINT, 0, tuning.Seeds())
    splits = {(s.split, s.seed in tuning.TEST_SEEDS) for s in settings}
    assert splits == {("validation", False), ("test", True)}


def test_a_run_ends_with_its_budget_or_with_its_target():
    easy = target.train_to_target(TINY)
    assert easy["steps_to_target"] < easy["horizon"] == easy["steps"] == 16
    assert -5 < easy["level"] < -3 and 0 < len(easy["curve"]) <= target.KEPT + 2
    assert all(len(point) == 4 for point in easy["noise"])
    hard = target.train_to_target(replace(TINY, target=1.5))
    assert hard["steps_to_target"] is None and hard["steps"] == 20
    assert hard["level"] == easy["level"]
    assert runs.setting_of(easy) == TINY
    broken = target.train_to_target(replace(TINY, lr=1e30))
    assert broken["diverged"] and broken["level"] is None


def test_a_run_that_diverges_after_its_target_ends_there(monkeypatch):
    """Not at the next step whose level the record keeps."""
    rates = training.Job.step
    plain = target.train_to_target(TINY)
    reached = plain["steps_to_target"]

    def step(job, examples, rate, look):
        taken = getattr(job, "taken", 0)
        job.taken = taken + 1
        return rates(job, examples, 1e30 if taken == reached else rate, look)

    monkeypatch.setattr(training.Job, "step", step)
    found = target.train_to_target(TINY)
    assert found["steps_to_target"] == reached
    judged = target.judged_steps(20, plain["horizon"])
    assert found["diverged"] == found["steps"] == min(s for s in judged if s > reached)


def test_judged_steps_are_dense_enough():
    steps = list(target.judged_steps(1000, 90))
    assert steps[0] == 20 and {90, 1000} <= set(steps)
    assert all(b - a <= math.ceil(a * 0.08) + 1 for a, b in itertools.pairwise(steps))


def test_a_killed_run_is_run_again_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "steps.jsonl"
    kept = runs.Runs(tmp_path, "steps")
    first = kept.get(TINY)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    made: list[Setting] = []

    def make(setting: Setting) -> dict[str, object]:
        made.append(setting)
        return {**target.non_defaults(setting), "seconds": 1.0}

    monkeypatch.setattr(runs, "make", make)
    again = runs.Runs(tmp_path, "steps")
    assert again.get(TINY) == first and not made
    again.get(replace(TINY, seed=8))
    assert [setting.seed for setting in made] == [8]
    assert path.read_bytes().startswith(whole)
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2


TASK = replace(
    plan.DIGITS, counts=(1, 4), valleys=(4,), methods=("average", "adasum-grad")
)


def pretend(setting: Setting) -> dict[str, object]:
    """Return a record whose best rate is the lattice's at -6 for four workers, else at -8.

    The average's test runs miss their target with four workers.
    """
    best = tuning.rate(-6 if setting.workers == 4 else -8)
    steps = round(100 * (1 + abs(math.log(setting.lr / best))))
    if (setting.op, setting.workers, setting.split) == ("average", 4, "test"):
        steps = None
    return {
        **target.non_defaults(setting), "steps_to_target": steps, "steps": 400, "level": 0.9,
        "seconds": 1.0, "validation": abs(math.log(setting.outer_lr)), "test": 2.0,
        "noise": [[10, 40.0, 4.0, 9.0]],
    }  # fmt: skip


def test_the_plan_goes_on_where_it_was(tmp_path, monkeypatch):
    """The same runs follow after any number of runs, with any number of jobs."""
    monkeypatch.setattr(runs, "make", pretend)
    monkeypatch.setitem(plan.TASKS, "tiny", (TASK,))
    seeds = tuning.Seeds((101,), (1,))
    whole = runs.Runs(tmp_path / "whole", "steps")
    assert program.run("tiny", None, whole, hours=1)
    expected = (tmp_path / "whole/steps.jsonl").read_text()
    for count, jobs in ((1, 1), (5, 1), (5, 2)):
        folder = tmp_path / f"{count}-{jobs}"
        folder.mkdir()
        lines = expected.splitlines(keepends=True)[:count]
        (folder / "steps.jsonl").write_text("".join(lines))
        assert program.run("tiny", None, runs.Runs(folder, "steps"), 1, jobs=jobs)
        found = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
        assert sorted(found) == sorted(expected.splitlines(keepends=True))
        assert jobs > 1 or "".join(found) == expected
    point = plan.Point(TASK, "adasum-grad", 4)
    assert plan.best_of(point, seeds, whole.find) == -6
    assert plan.transferred(point, seeds, whole.find) == -8
    for cell in schedule.cells(TASK):
        found = schedule.result(cell, seeds, whole.find)
        assert found and found.index == -6 and len(found.records) == 1
    rates = {s.lr for s in plan.valley(point, seeds, whole.find)}
    assert rates == {tuning.rate(index) for index in range(-11, -2)}
    assert all(whole.find(s) for s in plan.valley(point, seeds, whole.find))


def test_a_search_goes_on_to_the_rates_of_the_next_numbers_of_workers(monkeypatch):
    """Two workers' search ends below a rate at which a seed misses; four's best is above it."""
    task = replace(TASK, counts=(1, 4, 2), methods=("average",))
    seeds = tuning.Seeds((101,), (1,))
    steps = {
        1: {-8: 80}, 2: {-8: 50, -7: None, -6: 30}, 4: {-7: 25, -6: 20}
    }  # fmt: skip

    def find(setting: Setting) -> tuning.Record:
        at = {tuning.rate(k): n for k, n in steps.get(setting.workers, {}).items()}
        count = at.get(setting.lr, 90)
        return {"steps_to_target": count, "steps": 100, "level": 0.9}

    two, four = plan.Point(task, "average", 2), plan.Point(task, "average", 4)
    assert tuning.followed(plan.first_search(two, seeds, find), find) == -8
    assert plan.best_of(four, seeds, find) == plan.best_of(two, seeds, find) == -6
    rates = {s.lr for s in plan.main_runs(task, seeds, find) if s.workers == 2}
    assert rates >= {tuning.rate(k) for k in (-9, -8, -7, -6, -5)}
    monkeypatch.setitem(steps, 4, {-8: 20})
    assert plan.best_of(two, seeds, find) == -8


def test_runs_that_need_no_other_are_found_together():
    """Three rates with three seeds first; then the best is known, and its test runs are."""
    seeds, point = tuning.Seeds(), plan.Point(TASK, "average", 1)
    done: dict[str, dict[str, object]] = {}

    def find(setting: Setting) -> tuning.Record | None:
        return done.get(setting.key)

    def missing() -> list[Setting]:
        return tuning.independent(plan.main_runs(TASK, seeds, find), find)

    first = missing()
    assert [(s.lr, s.seed) for s in first] == [
        (tuning.rate(k), seed) for k in (-9, -8, -7) for seed in seeds.tuning
    ]
    done.update({s.key: pretend(s) for s in first})
    assert missing()[:5] == tuning.tested(point.setting, -8, seeds)


def test_far_below_its_target_a_model_is_judged_by_a_part(monkeypatch):
    small = tuple(each[:1500] for each in glyphs.images("validation"))
    monkeypatch.setattr(glyphs, "images", lambda split: small)
    work, seen = workloads.workload("glyphs", "validation"), []

    class Knows(torch.nn.Module):
        """Right about the second half of 1500 images, and none of the first."""

        def forward(self, x):
            seen.append(len(x))
            begin = sum(seen) - len(x)
            labels = small[1][begin : begin + len(x)]
            wrong = torch.arange(begin, begin + len(x)) < 750
            return torch.nn.functional.one_hot((labels + wrong) % 62, 62).float()

    assert work.level(Knows()) == 0.5 and seen == [1000, 500]
    seen.clear()
    assert work.level(Knows(), far_below=0.3) == 0.25 and seen == [1000]
    seen.clear()
    assert work.level(Knows(), far_below=0.2) == 0.5


def test_no_time_is_no_run(tmp_path):
    kept = runs.Runs(tmp_path, "steps")
    assert not program.run("tiny", None, kept, hours=-1)
    assert not kept.all()


def test_all_methods_of_a_number_of_workers_are_next_to_each_other():
    for task in plan.TASKS["small"]:
        found = list(plan.points(task))
        assert (
            len(found)
            == len(set(found))
            == 2 + len(task.methods) * (len(task.counts) - 1)
        )
        order = [point.workers for point in found]
        assert order == sorted(order, key=task.counts.index)


def test_the_large_batch_of_the_average_is_its_workers():
    one, other = (
        torch.cat([t.flatten() for t in train(replace(SGD, op=op), 6).weights])
        for op in ("average", "sum")
    )
    scaled = train(replace(SGD, op="sum", lr=SGD.lr / 4), 6).weights
    torch.testing.assert_close(one, torch.cat([t.flatten() for t in scaled]))
    assert (one - other).abs().max() > 1e-3


def test_workers_that_change_take_the_same_examples_in_each_phase():
    setting = replace(TEXT, phases="4-1-2", scaling="", budget=2**11 * 3, warm_up=0.05)
    fixed, linear = (
        changing.train_changing(replace(setting, scaling=s)) for s in ("", "linear")
    )
    assert fixed["steps"] == linear["steps"] == [16, 64, 32]
    assert len(fixed["levels"]) == 3 and fixed["levels"] != linear["levels"]
    assert runs.setting_of(fixed) == setting
    assert runs.make(setting)["levels"] == fixed["levels"]


def test_only_the_average_has_another_rate_than_one_workers_when_workers_change():
    task, seeds = TASK, tuning.Seeds((101,), (1, 2))
    assert not list(program.changing(task, seeds, lambda setting: None))
    found = list(program.changing(task, seeds, pretend))
    assert {s.lr for s in found if s.op != "average"} == {tuning.rate(-8)}
    assert {s.lr for s in found if s.scaling} == {tuning.rate(-8)}
    fixed = {s.lr for s in found if s.op == "average" and not s.scaling}
    assert fixed == {tuning.rate(index) for index in (-8, -5, -4)}
    assert {setting.seed for setting in found} == {1, 2}
    assert len({setting.key for setting in found}) == len(found) == 14


def test_outer_rates_are_tuned_by_other_seeds():
    best = {"average": 1, "rda": 0, "adasum": -2}

    def find(setting: Setting) -> tuning.Record:
        goal = tuning.rate(best[setting.op.removesuffix("-delta")])
        loss = 2 + abs(math.log(setting.outer_lr / goal))
        return {"validation": loss, "test": loss + 1}

    seeds = tuning.Seeds()
    for cell in local_outer.cells("tiny"):
        outer, losses = local_outer.results(cell, seeds, find) or (0, [])
        assert outer == tuning.rate(best[cell.method]) and losses == [3.0] * 5
    assert len(list(local_outer.cells("small"))) == 2 * 4 * 3 * 3


def test_glyphs_are_as_many_as_the_page_says():
    assert glyphs.IMAGES["train"] >= 50_000 and glyphs.IMAGES["test"] >= 10_000
    assert len(glyphs.CLASSES) == 62 and len(set(glyphs.FONTS)) == 20
    images, labels = glyphs.images("validation")
    assert images.shape == (5000, 1, 16, 16) and set(labels.tolist()) == set(range(62))
    assert torch.equal(glyphs.images.__wrapped__("validation")[0], images)
    inked = glyphs.masters().flatten(2).sum(2)
    assert (inked > 10).all()


def test_a_step_on_glyphs(monkeypatch):
    small = tuple(each[:500] for each in glyphs.images("validation"))
    monkeypatch.setattr(glyphs, "images", lambda split: small)
    setting = Setting("glyphs", "momentum-decay", "adasum-grad", 2, 0.05, 1)
    job = training.Job(setting)
    images, labels = next(job.work.draws(1, 2, 16))
    assert images.shape == (2, 16, 1, 16, 16) and labels.shape == (2, 16)
    before = job.agreed[0].clone()
    job.step((images, labels), 0.05, look=False)
    assert (job.agreed[0] - before).abs().max() > 0
    assert 0 <= job.work.level(job.model) <= 1
    layers = [m for m in job.model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len([m for m in layers if m.kernel_size == (3, 3)]) + 1 == 8


def test_the_tables_are_those_of_the_runs():
    kept = runs.Runs(CONVERGENCE / "raw", "none", only_kept=True)
    results = target_report.Results(kept, plan.SEEDS["small"])
    written = (CONVERGENCE / "tables.md").read_text()
    assert target_report.section(plan.TASKS["small"], results) in written
    for record in kept.all():
        if record.get("target"):
            assert not record["code"].endswith(("+", "unknown")), record
            assert (record.get("split") == "validation") == (
                record.get("seed", 1) in tuning.TUNING_SEEDS
            )


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        *(f"docs/{page}.md" for page in ("convergence", "choose", "monitor", "torch")),
    ],
)
def test_no_page_contradicts_the_runs(name):
    """Every mean with its deviation is a cell of a table that is computed from the runs."""
    page = (CONVERGENCE.parents[1] / name).read_text().replace("+-", "±")
    quoted = re.findall(r"\d+(?:\.\d+)? ± \d+(?:\.\d+)?", page)
    files = [CONVERGENCE / file for file in ("tables.md", "batch32-table.md")]
    tables = "".join(file.read_text() for file in files).replace("+-", "±")
    tables = re.sub(" +", " ", tables)
    assert [each for each in quoted if f" {each}" not in tables] == []
    assert len(quoted) > 100 or not name.endswith("convergence.md")


def test_the_page_quotes_the_real_jobs():
    page = (CONVERGENCE.parent / "convergence.md").read_text()
    real = json.loads((CONVERGENCE / "real.json").read_text())
    names = {"average": "Average", "adasum-grad": "AdasumGrad"}
    assert {row["work"] for row in real["rows"]} == {"digits", "gpt-small"}
    for row in real["rows"]:
        of = row["simulated"]
        digits = row["work"] == "digits"
        levels = [
            f"{level:.1%}" if digits else f"{-level:.3f}"
            for level in (row["level"], of["level"])
        ]
        assert (
            f"| {names[row['method']]} | {row['seed']} | {', '.join(levels)} "
            f"| {row['steps_to_target']}, {of['steps_to_target']} "
            f"| {row['seconds_to_target']:.1f} |"
        ) in page.replace(" %", "%")
        assert abs(row["level"] - of["level"]) < (3.5 / 360 if digits else 0.002)
    for row in real["predicted"]:
        if row["rate"] == "its own":
            cells = " | ".join(f"{each:.2f}" for each in row["seconds"].values())
            start = (
                f"| {row['workers']} | {names[row['method']]} | {row['steps']:.0f} |"
            )
            assert f"{start} {cells} |" in page
    for job in json.loads((CONVERGENCE / "elastic.json").read_text())["rows"]:
        end = job["log"][-1]
        assert [line["ranks"] for line in job["log"]] == [*job["counts"], end["ranks"]]
        assert end["identical"] and f"{end['accuracy']:.1%}" in page.replace(" %", "%")


def test_the_advice_is_counted():
    kept = runs.Runs(CONVERGENCE / "raw", "none", only_kept=True)
    results = target_report.Results(kept, plan.SEEDS["small"])
    rows = advice_report.compared(plan.DIGITS, results)
    assert len(rows) >= 2
    assert sum(row.is_right(row.carried) for row in rows) >= 0.8 * len(rows)
    assert all(row.is_near(row.expected) for row in rows)
    written = (CONVERGENCE / "tables.md").read_text()
    assert advice_report.table(plan.TASKS["small"], results) in written
    every = [
        row
        for task in plan.TASKS["small"]
        for row in advice_report.compared(task, results)
    ]
    right = sum(row.is_right(row.carried) for row in every)
    page = (CONVERGENCE.parent / "convergence.md").read_text()
    sentence = f"It names the better reduction at {right} of {len(every)} points, "
    assert f"{sentence}{right / len(every):.0%}" in page.replace(" %", "%")
    right = sum(row.is_right(row.tuned) for row in every)
    assert f"the same advice is right at {right} of {len(every)}" in page
    near = sum(row.is_near(row.expected) for row in every)
    assert f"within 15 % of the runs at {near} of {len(every)} points" in page
    single = [row.is_near(each.speedup) for row in every for each in row.advice]
    words = " ".join(page.split())
    assert f"within 15 % in {sum(single)} of {len(single)} cases" in words
    whole = [statistics.mean(each.speedup for each in row.whole) for row in every]
    known = sum(row.is_near(each) for row, each in zip(every, whole, strict=True))
    assert f"the mean is within 15 % at {known} of {len(every)} points" in words
    monitor = " ".join((CONVERGENCE.parent / "monitor.md").read_text().split())
    assert f"{near} of {len(every)} measured points are within 15 % of it" in monitor
    assert f"Of single runs {sum(single)} of {len(single)} are" in monitor


def test_a_picture_of_few_runs(tmp_path, monkeypatch):
    """Hollow marks included: the test seed misses the target at four workers."""
    monkeypatch.setattr(runs, "make", pretend)
    monkeypatch.setitem(plan.TASKS, "tiny", (TASK,))
    kept = runs.Runs(tmp_path, "steps")
    program.run("tiny", None, kept, hours=1)
    results = target_report.Results(kept, plan.SEEDS["tiny"])
    target_report.draw((TASK,), results, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "steps-digits.png",
        "rates-digits.png",
    }
    found = target_report.table(TASK, results)
    assert "| 1 | all | 1x (0.01235) | 100 | 90.0 | 100 | 90.0 |" in found
    advised = advice_report.table((TASK,), results)
    assert "| digits | 4 | 2.5 | 2.5 | 0.5 |" in advised
    assert "| 4 | average | 3x (0.03704) | missed by all 1 seeds |" in found
    assert "Not run yet" not in found
    schedules = outer_report.schedules(TASK, results)
    assert "| 20% | 0.9 | missed by all 1 seeds" in schedules
    assert schedules.count("| 100 (0.03704) | not run |") == len(schedule.VARIANTS)
