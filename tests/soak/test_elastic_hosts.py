"""An elastic job on hosts of their own, one of which nobody reaches any more."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from namespaces import Hosts, missing

from tests.parallel.harness.elastic_jobs import check, run_job
from tests.parallel.harness.launch import waits

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.parametrize(
    ("script", "op"),
    [
        ("elastic_torch_job.py", "adasum-delta"),
        ("elastic_torch_job.py", "adasum-grad"),
        ("elastic_keras_job.py", "adasum-grad"),
    ],
)
def test_a_host_is_cut_off(tmp_path: Path, script: str, op: str) -> None:
    faults = {"7": {"host": "adasum2", "kind": "cut", "phase": "negotiation"}}
    with Hosts(2) as machines:

        def cut() -> None:
            limit = time.monotonic() + 200
            while not (tmp_path / "done-fault-7-0").exists():
                if time.monotonic() > limit:
                    return
                time.sleep(0.05)
            machines.run("switch", "ip link set dev port2 down")
            (tmp_path / "cut").touch()

        thread = threading.Thread(target=cut)
        thread.start()
        story = run_job(
            tmp_path, script, "adasum1:2\nadasum2:1", machines, waits(10),
            op=op, loop="function", faults=faults,
        )  # fmt: skip
        thread.join()
    check(story)
    assert story.sizes() == [3, 2], story.output[-6000:]
    assert {line["start"] for line in story.rounds()[1][:2]} == {6}  # the last commit
