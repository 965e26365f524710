"""Elastic jobs by real horovodrun: hosts come and go, ranks die, and training goes on."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import HOROVODRUN, environment, run_launcher

JOB = HOROVODRUN.with_name("elastic_torch_job.py")
SAMPLES = 96


@dataclass
class Story:
    """What the ranks of a job wrote down, line by line."""

    lines: list[dict]
    output: str

    def by(self, key: str) -> list[dict]:
        return [line for line in self.lines if key in line]

    def sizes(self) -> list[int]:
        """Return how many ranks there were, from change to change."""
        found = [line["size"] for line in self.by("step")]
        return [s for i, s in enumerate(found) if i == 0 or s != found[i - 1]]


def run_job(tmp_path: Path, first_hosts: str, slots: int, **plan: object) -> Story:
    """Run an elastic job to its end and return its story."""
    known = tmp_path / "hosts"
    known.write_text(first_hosts)
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {known}\n")
    script.chmod(0o755)
    log = tmp_path / "log"
    file = tmp_path / "plan.json"
    plan = {"epochs": 2, "commit": 3} | plan | {"log": str(log), "file": str(known)}
    file.write_text(json.dumps(plan))
    words = [sys.executable, str(HOROVODRUN), "-np", str(slots), "--gloo"]
    # Without an interface horovodrun waits for a second host, to see which ones they share.
    words += ["--min-np", "1", "--max-np", "5", "--network-interfaces", "lo"]
    words += ["--host-discovery-script", str(script)]
    words += [sys.executable, str(JOB), str(file)]
    status, output = run_launcher(words, environment(), 150)
    assert status == 0, output[-6000:]
    return Story([json.loads(line) for line in log.read_text().splitlines()], output)


def check(story: Story, epochs: int = 2, replicas: bool = True) -> None:
    """Check that replicas are equal, and every sample of every epoch is trained on.

    Without `replicas` not after every step: inside a window of local steps they are not.
    """
    ends = story.by("end")
    assert ends and (len({line["weights"] for line in ends}) == 1 or not replicas)
    starts: dict[tuple, set] = defaultdict(set)
    steps: dict[tuple, set] = defaultdict(set)
    last: dict[
        int, tuple
    ] = {}  # the ranks that took a step, the last time it was taken
    for number, line in enumerate(story.lines):
        if "start" in line:
            starts[line["start"], line["size"]].add(line["weights"])
        if "step" in line:
            steps[line["step"], line["size"]].add(line["weights"])
            last[line["step"]] = (number, line["size"])
    assert sorted(last) == list(range(max(last) + 1))  # none left out
    assert all(len(weights) == 1 for weights in starts.values())
    if replicas:
        assert all(len(weights) == 1 for weights in steps.values())
    for epoch in range(epochs):
        seen: set[int] = set()
        for line in story.by("step"):
            if line["epoch"] == epoch and line["size"] == last[line["step"]][1]:
                seen.update(line["samples"])
        assert seen == set(range(SAMPLES)), f"epoch {epoch}"


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta", "average"])
def test_hosts_come_and_go(tmp_path: Path, op: str) -> None:
    hosts = {"3": "localhost:2", "8": "localhost:2\n127.0.0.1:1", "16": "localhost:2"}
    story = run_job(tmp_path, "localhost:1", 1, op=op, hosts=hosts, epochs=3)
    check(story, 3)
    assert story.sizes()[0] == 1 and {2, 3} <= set(story.sizes())


@pytest.mark.parametrize("kind", ["kill", "exception"])
@pytest.mark.parametrize(
    ("op", "phase"), [("adasum-grad", "reduction"), ("adasum-delta", "forward")]
)
def test_a_rank_dies(tmp_path: Path, op: str, phase: str, kind: str) -> None:
    faults = {"7": {"host": "127.0.0.1", "kind": kind, "phase": phase}}
    story = run_job(tmp_path, "localhost:2\n127.0.0.1:1", 3, op=op, faults=faults)
    check(story)
    assert story.sizes() == [3, 2], story.output[-6000:]
    again = [line["start"] for line in story.by("start") if line["size"] == 2]
    assert set(again) == {6}  # the last commit


def test_a_window_of_local_steps_goes_on(tmp_path: Path) -> None:
    faults = {"7": {"host": "127.0.0.1", "kind": "kill", "phase": "forward"}}
    story = run_job(
        tmp_path, "localhost:2\n127.0.0.1:1", 3, op="adasum-delta", local_steps=4,
        faults=faults, commit=2,
    )  # fmt: skip
    check(story, replicas=False)
    assert story.sizes() == [3, 2], story.output[-6000:]
    reduced = [line for line in story.by("step") if line["step"] % 4 == 3]
    by_step = defaultdict(set)
    for line in reduced:
        by_step[line["step"], line["size"]].add(line["weights"])
    assert by_step and all(len(weights) == 1 for weights in by_step.values())
