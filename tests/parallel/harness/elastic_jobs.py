"""Start an elastic job by real horovodrun, and check the log of its ranks."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from jobs import search_path
from namespaces import INTERFACE, Hosts

from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import (
    HOROVODRUN,
    PROGRAMS,
    environment,
    run_launcher,
)
from tests.parallel.programs.elastic_plan import SAMPLES

LIMIT_SECONDS = 400


@dataclass
class Story:
    """The log of a job's ranks, line by line."""

    lines: list[dict]
    output: str

    def by(self, key: str) -> list[dict]:
        return [line for line in self.lines if key in line]

    def rounds(self) -> list[list[dict]]:
        """Return the lines from one change of the ranks to the next."""
        found: dict[int, list[dict]] = defaultdict(list)
        for line in self.lines:
            found[line["round"]].append(line)
        return [found[number] for number in sorted(found)]

    def sizes(self) -> list[int]:
        """Return how many ranks there were, from change to change."""
        return [lines[0]["size"] for lines in self.rounds()]

    def lasting(self) -> dict[int, list[dict]]:
        """Return by step what its ranks wrote the last time that it was taken."""
        found: dict[int, list[dict]] = {}
        for lines in self.rounds():
            steps = [line for line in lines if "step" in line]
            found |= {line["step"]: [] for line in steps}
            for line in steps:
                found[line["step"]].append(line)
        return found


def run_job(
    tmp_path: Path,
    script: str,
    first_hosts: str,
    machines: Hosts | None = None,
    variables: tuple[tuple[str, str], ...] = (),
    **plan: object,
) -> Story:
    """Run an elastic job to its end and return its story; on `machines` if they are given."""
    known = tmp_path / "hosts"
    known.write_text(first_hosts)
    discover = tmp_path / "discover"
    discover.write_text(f"#!/bin/sh\ncat {known}\n")
    discover.chmod(0o755)
    log = tmp_path / "log"
    file = tmp_path / "plan.json"
    plan = {"epochs": 2, "commit": 3} | plan | {"log": str(log), "file": str(known)}
    file.write_text(json.dumps(plan))
    slots = sum(int(line.partition(":")[2]) for line in first_hosts.split())
    words = machines.enter(machines.names[0]) if machines else []
    words += [*HOROVODRUN, "-np", str(slots), "--gloo"]
    # Without an interface horovodrun waits for a second host, to see which ones they share.
    words += ["--network-interfaces", INTERFACE if machines else "lo"]
    words += [
        "--min-np",
        "1",
        "--max-np",
        "5",
        "--host-discovery-script",
        str(discover),
    ]
    words += python("tensorflow" if "keras" in script else "torch")
    words += [str(PROGRAMS / script), str(file)]
    variables = (("PATH", search_path(machines)), *variables)
    status, output = run_launcher(words, environment(variables), LIMIT_SECONDS)
    assert status == 0, output[-6000:]
    return Story([json.loads(line) for line in log.read_text().splitlines()], output)


def check(story: Story, replicas: bool = True) -> None:
    """Check that only steps after a commit were lost, and that replicas are equal.

    Without `replicas` not after every step: inside a window of local steps they are not.
    """
    lasting = story.lasting()
    assert sorted(lasting) == list(range(max(lasting) + 1))  # none left out
    for step, lines in lasting.items():
        ranks = [line["rank"] for line in lines]
        assert sorted(ranks) == list(range(lines[0]["size"])), f"step {step}"
        assert not replicas or len(weights_of(lines)) == 1, f"step {step}"
    for lines in story.rounds():
        starts = [line for line in lines if "start" in line]
        assert len(starts) == starts[0]["size"] and len(weights_of(starts)) == 1
        begun = {line["start"] for line in starts}
        assert len(begun) == 1
        if replicas and begun != {0}:  # from the weights of the step before
            assert weights_of(starts) == weights_of(lasting[begun.pop() - 1])
    ends = story.by("end")
    assert len(ends) == ends[0]["size"] and {end["end"] for end in ends} == {
        len(lasting)
    }
    assert not replicas or len(weights_of(ends)) == 1
    check_samples(lasting)
    losses = [mean(line["loss"] for line in lasting[step]) for step in sorted(lasting)]
    assert mean(losses[-5:]) < mean(losses[:5])


def weights_of(lines: list[dict]) -> set[str]:
    """Return the weights that ranks had, by name."""
    return {line["weights"] for line in lines}


def check_samples(lasting: dict[int, list[dict]]) -> None:
    """Check that each sample of each epoch is trained on once.

    Where they do not divide by the ranks, some are repeated at the epoch's end.
    """
    epochs: dict[int, list[dict]] = defaultdict(list)
    for lines in lasting.values():
        for line in lines:
            epochs[line["epoch"]].append(line)
    for epoch, lines in epochs.items():
        seen = Counter(sample for line in lines for sample in line["samples"])
        assert set(seen) == set(range(SAMPLES)), f"epoch {epoch}"
        ranks = max(lines, key=lambda line: line["step"])["size"]
        assert seen.total() - SAMPLES < ranks, f"epoch {epoch}: {seen}"
