"""The containers' and workflows' files agree with each other and with the repository."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
WORKFLOWS = sorted((REPOSITORY / ".github").glob("**/*.yml"))
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def requirements(path: Path) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-c")]


def steps(path: Path) -> list[dict]:
    document = yaml.safe_load(path.read_text())
    jobs = [*document.get("jobs", {}).values(), document.get("runs", {})]
    return [step for job in jobs for step in job.get("steps", [])]


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


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_copied_files_exist_and_reach_the_build(path):
    allowed = re.findall(r"^!(\S+)", (REPOSITORY / ".dockerignore").read_text(), re.M)
    copies = re.findall(r"^COPY (?!--from)(.*)$", path.read_text(), re.MULTILINE)
    assert copies
    for copy in copies:
        sources = [word for word in shlex.split(copy) if not word.startswith("--")][:-1]
        for source in sources:
            pattern = re.sub(r"\$\{\w+\}", "*", source)
            assert list(REPOSITORY.glob(pattern)), source
            assert source.split("/")[0] in allowed, f"{source} is not in .dockerignore"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_pinned_and_do_not_run_as_root(path):
    text = path.read_text()
    stages = set(re.findall(r"^FROM .* AS (\S+)", text, re.MULTILINE))
    for base in re.findall(r"^FROM (\S+)|^ARG BASE=(\S+)", text, re.MULTILINE):
        image = base[0] or base[1]
        is_stage = re.sub(r"\$\{FRAMEWORK\}", "torch", image) in stages
        assert is_stage or image == "${BASE}" or "@sha256:" in image, image
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001$", last, re.MULTILINE)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_images_copy_builds_them_again(path):
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/docker.yml").read_text())
    triggers = workflow[True]  # YAML 1.1 reads `on` so
    assert triggers["push"]["paths"] == triggers["pull_request"]["paths"]
    watched = {name.removesuffix("/**") for name in triggers["push"]["paths"]}
    text = re.sub(
        r"^FROM base AS test$.*?(?=^FROM )", "", path.read_text(), flags=re.M | re.S
    )
    for copy in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in [w for w in shlex.split(copy) if not w.startswith("--")][:-1]:
            assert source.split("/")[0] in watched, source


def test_both_gpu_images_are_built_without_a_device():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/docker.yml").read_text())
    job = jobs["jobs"]["gpu"]
    assert job["strategy"]["matrix"]["framework"] == ["torch", "tensorflow"]
    assert "self-hosted" not in job["runs-on"]
    said = " ".join(step.get("run", "") for step in job["steps"])
    assert "docker/Dockerfile.gpu" in said
    assert "adasum-hvd doctor" in said


def test_gpu_image_builds_with_nccl_for_either_framework():
    text = (DOCKER / "Dockerfile.gpu").read_text()
    assert re.search(r"adasum-hvd build .*--gpu nccl", text)
    for framework in ("torch", "tensorflow"):
        assert (DOCKER / f"requirements-gpu-{framework}.txt").exists()
        for image in ("cuda", "nvcc"):
            assert re.search(rf"^FROM \S+ AS {image}-{framework}$", text, re.MULTILINE)


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
    assert (REPOSITORY / job["command"][job["command"].index("python") + 1]).is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_exists(path):
    for step in steps(path):
        for target in re.findall(r"\bmake ([a-z./-]+)", step.get("run", "")):
            name = target.replace(".venv/", "$(VENV)/")
            assert re.search(rf"^{re.escape(name)}:", MAKEFILE, re.MULTILINE), target
    names = re.findall(
        r"(?:docker|\.github)/[\w./-]+\.(?:yml|cpu|gpu|sh)", path.read_text()
    )
    for name in names:
        assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path):
    for used in [step["uses"] for step in steps(path) if "uses" in step]:
        if used.startswith("./"):
            assert (REPOSITORY / used / "action.yml").is_file()
        else:
            assert re.search(r"@[0-9a-f]{40}$", used), used


@pytest.mark.parametrize(
    "path", [p for p in WORKFLOWS if p.parent.name == "workflows"], ids=lambda p: p.name
)
def test_jobs_end_and_may_only_read(path):
    document = yaml.safe_load(path.read_text())
    assert document["permissions"] == {"contents": "read"}
    assert document["concurrency"]["cancel-in-progress"] is True
    for name, job in document["jobs"].items():
        assert job["timeout-minutes"] <= 120, name


def test_matrix_names_versions_that_exist():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"]
    rows = jobs["parallel"]["strategy"]["matrix"]["include"]
    used = {row["versions"] for row in rows} - {"pinned"}
    found = {path.stem for path in (REPOSITORY / ".github/versions").glob("*.txt")}
    assert used == found
    supported = {"3.10", "3.11", "3.12", "3.13"}
    assert {row["python"] for row in rows} == supported
    assert set(jobs["unit"]["strategy"]["matrix"]["python"]) == supported
