"""Containers and workflows name versions that are tested, and hosts that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from adasum_hvd.common import ops

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))


def requirements(path: Path) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-c")]


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    """The version that docker/constraints.txt gives each package."""
    found = {}
    for line in requirements(DOCKER / "constraints.txt"):
        (specifier,) = line.specifier
        assert specifier.operator == "==", line
        assert canonicalize_name(line.name) not in found, f"{line.name} stands twice"
        found[canonicalize_name(line.name)] = specifier.version
    return found


def test_images_hold_the_versions_that_are_tested(pins):
    text = (REPOSITORY / "pyproject.toml").read_text()
    dev = re.search(r"^dev = \[(.*?)^\]", text, re.M | re.S)[1]
    pinned = [Requirement(line) for line in re.findall(r'"([^"]+)"', dev)]
    images = {"python_version": "3.11"}  # the Python of the images
    tested = {
        line.name: str(line.specifier).removeprefix("==")
        for line in pinned
        if line.marker is None or line.marker.evaluate(images)
    }
    assert len(tested) > 10
    shared = {name: version for name, version in tested.items() if name in pins}
    assert {"torch", "tensorflow-cpu", "keras", "numpy"} <= shared.keys()
    assert {name: pins[name] for name in shared} == shared
    assert pins["tensorflow"] == pins["tensorflow-cpu"]


@pytest.mark.parametrize("path", sorted(DOCKER.glob("requirements-*.txt")), ids=str)
def test_every_requirement_is_pinned(path, pins):
    assert "-c constraints.txt" in path.read_text().splitlines()
    for line in requirements(path):
        assert canonicalize_name(line.name) in pins, line


def test_compose_runs_its_job_on_its_hosts():
    services = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())["services"]
    hosts = {name for name, s in services.items() if s["command"] == ["sshd"]}
    job = services["job"]
    wanted = job["command"][job["command"].index("-H") + 1]
    assert {part.split(":")[0] for part in wanted.split(",")} == hosts
    assert job["depends_on"].keys() == hosts
    ranks = int(job["command"][job["command"].index("-np") + 1])
    assert sum(int(part.split(":")[1]) for part in wanted.split(",")) == ranks
    for name, service in services.items():
        assert service["hostname"] == name
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        assert service["volumes"] == ["keys:/keys"]
    program, *words = job["command"][job["command"].index("python") + 1 :]
    assert (REPOSITORY / program).is_file()
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options.keys() <= set(
        re.findall(r'add_argument\(\s*"(--\w+)"', (REPOSITORY / program).read_text())
    )
    assert ops.is_adasum(ops.parse(options["--op"]))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_end_and_may_only_read(path):
    document = yaml.safe_load(path.read_text())
    assert document["permissions"] == {"contents": "read"}
    assert document["concurrency"]["cancel-in-progress"] is (path.stem != "release")
    for name, job in document["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
        assert job.get("permissions", {"id-token": "write"}) == {"id-token": "write"}


def test_a_release_is_tested_and_published_without_a_token():
    path = REPOSITORY / ".github/workflows/release.yml"
    document = yaml.safe_load(path.read_text())
    assert document[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    build, publish = document["jobs"]["build"], document["jobs"]["publish"]
    assert {"run": "make wheel sdist"} in build["steps"]
    assert publish["needs"] == "build" and publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert "permissions" not in build
    assert "secrets." not in path.read_text()


def test_matrix_names_versions_that_exist():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"]
    rows = jobs["parallel"]["strategy"]["matrix"]["include"]
    used = {row["versions"] for row in rows} - {"pinned"}
    found = {path.stem for path in (REPOSITORY / ".github/versions").glob("*.txt")}
    assert used == found
    supported = {"3.10", "3.11", "3.12", "3.13"}
    assert {row["python"] for row in rows} == supported
    assert set(jobs["unit"]["strategy"]["matrix"]["python"]) == supported
