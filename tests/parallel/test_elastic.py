"""An elastic job in which a rank dies: the least of tests/soak/test_elastic.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.harness.elastic_jobs import check, run_job


@pytest.mark.parametrize(
    ("script", "op", "rank"),
    [
        ("elastic_torch_job.py", "adasum-delta", 0),
        ("elastic_keras_job.py", "adasum-grad", 1),
    ],
)
def test_a_rank_dies(tmp_path: Path, script: str, op: str, rank: int) -> None:
    faults = {"7": {"rank": rank, "kind": "kill", "phase": "negotiation"}}
    hosts = "localhost:1\n127.0.0.1:1"
    story = run_job(tmp_path, script, hosts, op=op, loop="fit", epochs=1, faults=faults)
    check(story)
    assert story.sizes() == [2, 1], story.output[-6000:]
    # Who is the first rank then says so.
    assert story.output.count("1 ranks on 1 host over Gloo") == 1, story.output[-6000:]
