"""torchft with AdaSum: replicas that are killed and rejoin, and a replica that is a spare."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from adasum_hvd import reference
from tests.parallel.harness.launch import REPOSITORY, environment

torchft = pytest.importorskip("torchft")
REPLICAS, SECONDS = 3, 400
EXAMPLE = REPOSITORY / "examples" / "torch_torchft.py"
SPARE = Path(__file__).with_name("torchft_spare.py")


class Replica:
    """A replica's process, and the lines that it has printed."""

    def __init__(self, words: list[str]):
        self.lines: list[str] = []
        self._is_over = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._printed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True,
            stderr=self._errors, env=environment(),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._printed:
                self.lines.append(line.strip())
                self._printed.notify_all()
        with self._printed:
            self._is_over = True
            self._printed.notify_all()

    def wait_for(self, words: str) -> None:
        with self._printed:
            self._printed.wait_for(
                lambda: self._is_over or words in "\n".join(self.lines), SECONDS
            )
        self._errors.seek(0)
        found = words in "\n".join(self.lines)
        assert found, (words, self.lines, self._errors.read()[-3000:])

    def end(self) -> str:
        """Wait for a good end, and return the last line."""
        status = self.process.wait(SECONDS)
        self._reader.join()
        self._errors.seek(0)
        assert status == 0, (self.lines, self._errors.read()[-3000:])
        return self.lines[-1]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=2000
    )  # fmt: skip
    yield server.address()
    server.shutdown()


@pytest.fixture
def start() -> Iterator:
    """Return a function that starts a replica; replicas end with the test."""
    started: list[Replica] = []

    def begin(*words: str) -> Replica:
        started.append(Replica(list(words)))
        return started[-1]

    yield begin
    for replica in started:
        replica.process.kill()
        replica.process.wait()


@pytest.mark.parametrize("algorithm", ["gradients", "diloco", "local-sgd"])
def test_a_replica_is_killed_and_rejoins(
    lighthouse: str, start, algorithm: str
) -> None:
    def begin(number: int) -> Replica:
        words = ["--lighthouse", lighthouse, "--algorithm", algorithm, "--steps", "200"]
        return start(str(EXAMPLE), "--replica", str(number), *words)

    replicas = [begin(number) for number in range(REPLICAS)]
    replicas[2].wait_for("3 replicas")
    replicas[2].process.kill()
    replicas[0].wait_for("2 replicas")
    replicas[2] = begin(2)
    last = [replica.end() for replica in replicas]
    found = [
        re.search(r"ends at step (\d+), weights (\w+), accuracy (\S+)", line)
        for line in last
    ]
    assert all(found), last
    assert (
        len({match[1] for match in found}) == len({match[2] for match in found}) == 1
    ), last
    assert float(found[0][3]) > 0.8, last
    # Survivors trained on without it, and it began with their steps and not with its own.
    numbers = [
        int(n) for line in replicas[0].lines for n in re.findall(r"step (\d+), 2", line)
    ]
    (first,) = [
        int(n) for n in re.findall(r"step (\d+), \d replicas", replicas[2].lines[0])
    ]
    assert first > numbers[-1], (replicas[0].lines, replicas[2].lines)


def test_a_spare_contributes_nothing_and_gets_the_result(
    lighthouse: str, start
) -> None:
    """Two of three replicas are in each step; the reference joins these two."""
    replicas = [
        start(str(SPARE), lighthouse, str(number)) for number in range(REPLICAS)
    ]
    found = [json.loads(replica.end()) for replica in replicas]
    members = [one for one in found if one["participates"]]
    assert len(members) == 2
    for name in members[0]["inputs"]:
        inputs = [np.array(one["inputs"][name]) for one in members]
        expected = reference.adasum(inputs)
        for one in found:
            np.testing.assert_allclose(one["results"][name], expected, rtol=1e-6)
    assert found[0]["results"] == found[1]["results"] == found[2]["results"]


def test_what_is_refused() -> None:
    from adasum_hvd.distributed.torchft import ManagedAdasum, diloco

    adasum = ManagedAdasum(None, None)
    for name in ("use_bucketization", "should_quantize"):
        with pytest.raises(ValueError, match=f"but got {name}; leave it out"):
            diloco(adasum, [], None, None, 5, **{name: True})
    with pytest.raises(ValueError, match="rule: expected"):
        ManagedAdasum(None, None, rule="median")
