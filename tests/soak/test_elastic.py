"""Elastic jobs by real horovodrun: hosts come and go, ranks die, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.harness.elastic_jobs import check, run_job

TORCH, KERAS = "elastic_torch_job.py", "elastic_keras_job.py"
HOSTS = "localhost:2\n127.0.0.1:1"
GROWING = {
    "3": "localhost:2",
    "8": "localhost:2\n127.0.0.1:1",
    "12": "localhost:3\n127.0.0.1:2",
    "16": "localhost:2",
}
WIDE = 700  # so that a reduction takes long enough to die in

frameworks = pytest.mark.parametrize(
    ("script", "loop"),
    [(TORCH, ""), (KERAS, "function"), (KERAS, "fit")],
    ids=["torch", "function", "fit"],
)
variants = pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])


def fault(kind: str, phase: str = "negotiation", step: int = 7) -> dict[str, Any]:
    """Return a plan in which the ranks of one host fail in a step."""
    return {str(step): {"host": "127.0.0.1", "kind": kind, "phase": phase}}


@frameworks
@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta", "average"])
def test_hosts_come_and_go(tmp_path: Path, script: str, loop: str, op: str) -> None:
    story = run_job(
        tmp_path, script, "localhost:1", op=op, loop=loop, hosts=GROWING, epochs=3
    )
    check(story)
    assert story.sizes() == [1, 2, 3, 5, 2]


@frameworks
@pytest.mark.parametrize("kind", ["sleep", "kill"])
def test_a_rank_comes_late(tmp_path: Path, script: str, loop: str, kind: str) -> None:
    """Longer than Horovod waits for it, or never: the others go on."""
    late = {"host": "127.0.0.1", "kind": kind, "seconds": 45}
    hosts = {"3": HOSTS}
    story = run_job(
        tmp_path, script, "localhost:2", op="adasum-grad", loop=loop, hosts=hosts, late=late
    )  # fmt: skip
    check(story)
    assert story.sizes() == ([2, 3] if kind == "sleep" else [2, 2])


@frameworks
@variants
@pytest.mark.parametrize("phase", ["negotiation", "exchange", "gather"])
def test_a_rank_is_killed(
    tmp_path: Path, script: str, loop: str, op: str, phase: str
) -> None:
    # Not in a step that a commit follows: of the survivors one may end it, and commits it.
    faults = fault("kill", phase, step=4)
    story = run_job(
        tmp_path, script, HOSTS, op=op, loop=loop, faults=faults, hidden=WIDE
    )
    check(story)
    assert story.sizes() == [3, 2], story.output[-6000:]
    assert {line["start"] for line in story.rounds()[1][:1]} == {3}  # the last commit


@frameworks
@variants
def test_a_rank_raises_an_exception(
    tmp_path: Path, script: str, loop: str, op: str
) -> None:
    faults = fault("exception")
    story = run_job(tmp_path, script, HOSTS, op=op, loop=loop, faults=faults)
    check(story)
    assert story.sizes() == [3, 2], story.output[-6000:]


@frameworks
@variants
def test_all_ranks_of_a_host_are_killed(
    tmp_path: Path, script: str, loop: str, op: str
) -> None:
    hosts = "localhost:2\n127.0.0.1:2"
    faults = fault("kill")
    story = run_job(tmp_path, script, hosts, op=op, loop=loop, faults=faults)
    check(story)
    assert story.sizes() == [4, 2], story.output[-6000:]


@frameworks
def test_windows_of_a_rank_alone(tmp_path: Path, script: str, loop: str) -> None:
    """Another comes inside of a window of its, and leaves inside of one of both."""
    hosts = {"5": "localhost:1\n127.0.0.1:1", "15": "localhost:1"}
    story = run_job(
        tmp_path, script, "localhost:1", op="adasum-delta", loop=loop, local_steps=4,
        hosts=hosts, commit=1,
    )  # fmt: skip
    check(story, replicas=False)
    assert story.sizes() == [1, 2, 1], story.output[-6000:]


@frameworks
@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_a_window_of_local_steps_goes_on(
    tmp_path: Path, script: str, loop: str, kind: str
) -> None:
    story = run_job(
        tmp_path, script, HOSTS, op="adasum-delta", loop=loop, local_steps=4,
        faults=fault(kind), commit=2,
    )  # fmt: skip
    check(story, replicas=False)
    assert story.sizes() == [3, 2], story.output[-6000:]
    for step, lines in story.lasting().items():
        if step % 4 == 3:
            assert len({line["weights"] for line in lines}) == 1, f"step {step}"
