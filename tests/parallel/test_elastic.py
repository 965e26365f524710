"""An elastic job in which a rank dies: the least of tests/soak/test_elastic.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_jobs import check, run_job


@pytest.mark.parametrize(
    ("script", "op"),
    [
        ("elastic_torch_job.py", "adasum-delta"),
        ("elastic_keras_job.py", "adasum-grad"),
    ],
)
def test_a_rank_dies(tmp_path: Path, script: str, op: str) -> None:
    faults = {"7": {"host": "127.0.0.1", "kind": "kill", "phase": "negotiation"}}
    hosts = "localhost:1\n127.0.0.1:1"
    story = run_job(tmp_path, script, hosts, op=op, loop="fit", epochs=1, faults=faults)
    check(story)
    assert story.sizes() == [2, 1], story.output[-6000:]
