"""Containers and workflows use tested versions and existing hosts."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from horovod.runner import launch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from adasum_hvd.horovod.build import prerequisites

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


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="images have Python 3.11")
def test_images_hold_the_versions_that_are_tested(pins):
    """For direct requirements, the versions are those of the test environment."""
    needed = [Requirement(line) for line in metadata.requires("adasum_hvd")]
    names = {
        r.name
        for r in needed
        for extra in ("dev-demo", "dev")
        if r.marker is None or r.marker.evaluate({"extra": extra})
    }
    installed = {
        name: Version(metadata.version(name)).public for name in names if name in pins
    }
    assert {"torch", "tensorflow-cpu", "keras", "numpy"} <= installed.keys()
    assert {name: pins[name] for name in installed} == installed
    assert pins["tensorflow"] == pins["tensorflow-cpu"]


@pytest.mark.parametrize("path", sorted(DOCKER.glob("requirements-*.txt")), ids=str)
def test_every_requirement_is_pinned(path, pins):
    assert "-c constraints.txt" in path.read_text().splitlines()
    for line in requirements(path):
        assert canonicalize_name(line.name) in pins, line


def test_compose_runs_its_job_on_its_hosts(monkeypatch):
    """horovodrun parses the command, and the program runs with its options on one rank."""
    services = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())["services"]
    hosts = {name for name, s in services.items() if s["command"] == ["sshd"]}
    job = services["job"]
    assert job["depends_on"].keys() == hosts
    for name, service in services.items():
        assert service["hostname"] == name
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        assert service["volumes"] == ["keys:/keys"]
    monkeypatch.setattr(sys, "argv", job["command"])
    read = launch.parse_args()
    slots = [host.split(":") for host in read.hosts.split(",")]
    assert {name for name, _ in slots} == hosts and read.use_gloo
    assert sum(int(count) for _, count in slots) == read.num_proc
    words = [sys.executable, *read.command[1:], "--epochs", "1", "--device", "cpu"]
    ran = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


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
    runners = document["jobs"]["wheels"]["strategy"]["matrix"]["runner"]
    assert runners == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert set(publish["needs"]) == {"build", "wheels"}
    assert publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert "permissions" not in build
    assert "secrets." not in path.read_text()


def test_matrix_names_versions_that_exist():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"]
    rows = jobs["parallel"]["strategy"]["matrix"]["include"]
    used = {row["versions"] for row in rows} - {"pinned"}
    found = {path.stem for path in (REPOSITORY / ".github/versions").glob("*.txt")}
    assert used == found
    major, oldest = prerequisites.OLDEST
    _, newest = prerequisites.NEWEST_OF_TENSORFLOW
    supported = {f"{major}.{minor}" for minor in range(oldest, newest + 1)}
    assert {row["python"] for row in rows} == supported
    assert set(jobs["unit"]["strategy"]["matrix"]["python"]) == supported
