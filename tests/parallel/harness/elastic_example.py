"""Start an elastic example with as many ranks as it needs, and check what it prints."""

from __future__ import annotations

import re
from pathlib import Path

from jobs import REPOSITORY, run_launcher

from tests.parallel.harness.imported import python
from tests.parallel.harness.launch import HOROVODRUN, environment


def run(folder: Path, name: str, *words: str) -> float:
    """Run an example on two ranks of this host under an elastic launcher; return its accuracy."""
    hosts = folder / "hosts"
    hosts.write_text("localhost:2\n")
    launcher = [*HOROVODRUN, "-np", "2", "--min-np", "2", "--max-np", "2"]
    launcher += ["--network-interfaces", "lo", "--gloo"]
    launcher += ["--host-discovery-script", f"cat {hosts}"]
    program = python("tensorflow" if "keras" in name else "torch")
    program += [str(REPOSITORY / "examples" / name), *words]
    status, output = run_launcher([*launcher, *program], environment(), 300)
    assert status == 0, output[-3000:]
    (accuracy,) = re.findall(r"accuracy (\S+) %, replicas identical: True", output)
    return float(accuracy)
