"""The commands of `adasum-hvd` without ranks: what they read, print and return."""

from __future__ import annotations

import doctest
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import adasum_hvd
from adasum_hvd import cli
from adasum_hvd.horovod.build.findings import DoctorFinding, State
from adasum_hvd.mindspore.rank_table import Host
from adasum_hvd.tools import bench, doctor, hosts, jobs, machine, selfcheck, timeline

# ---- doctor ----


def test_the_worst_finding_is_the_status() -> None:
    found = [
        DoctorFinding("a", "fine"),
        DoctorFinding("b", "x", State.BROKEN),
        DoctorFinding("c", "y"),
    ]
    assert doctor.status(found) == 2 and doctor.status([]) == 0
    assert json.loads(doctor.as_json(found))["status"] == 2
    assert json.loads(doctor.as_json(found))["findings"][1]["state"] == "broken"


def test_the_table_is_as_wide_as_it_may() -> None:
    long = DoctorFinding("subject", "word " * 40, State.MISSING, "do something " * 10)
    lines = doctor.table([DoctorFinding("a", "b"), long], 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].split() == ["ok", "a", "b"]
    assert lines[1].startswith("MISSING subject  word")
    assert any("-> do something" in line for line in lines)


def test_a_result_beyond_a_rounding_is_wrong() -> None:
    for tensors in selfcheck.inputs(2).values():
        right = selfcheck.reference.adasum(tensors).astype(tensors[0].dtype)
        assert selfcheck.is_right(right, tensors)
        off = right * (1 + 8 * np.finfo(right.dtype).eps)
        assert not selfcheck.is_right(off, tensors)
        if right.size > 1:
            assert not selfcheck.is_right((tensors[0] + tensors[1]) / 2, tensors)


def test_wrong_numbers_and_errors_differ() -> None:
    wrong = {"wrong": ["float32 of 1"], "tried": 6, "ranks": 2}
    found = doctor._judged("gloo", "torch", wrong)
    assert found.state is State.WRONG and "1 of 6 wrong: float32 of 1" in found.found
    assert doctor._judged("mpi", "torch", {"error": "x"}).state is State.BROKEN
    assert doctor._judged("mpi", "torch", wrong | {"wrong": []}).state is State.FINE


def test_a_backend_or_framework_that_does_not_load_leaves_the_others(
    monkeypatch, tmp_path: Path
) -> None:
    for name in ("tensorflow", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('broken {name}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launchers = {"mpi": ["false"], "gloo": jobs.launcher("gloo", 1)}
    monkeypatch.setattr(jobs, "launcher", lambda backend, _: launchers[backend])
    for name in ("torch", "tensorflow"):
        assert doctor._try("mpi", name) == {"error": "the job printed nothing"}
        assert f"broken {name}" in doctor._try("gloo", name)["error"]


def test_a_job_that_hangs_is_ended() -> None:
    words = [
        sys.executable,
        "-c",
        "import time; print('on', flush=True); time.sleep(99)",
    ]
    status, output = jobs.output_of(words, os.environ, 3)
    assert status == 128 + signal.SIGTERM
    assert output.split() == ["on", "ended", "after", "3", "seconds"]


def test_jobs_have_no_variables_of_a_job_around_them(
    monkeypatch, tmp_path: Path
) -> None:
    (tmp_path / "shown.py").write_text(
        "import json, os, sys\njson.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    )
    monkeypatch.setattr(jobs, "launcher", lambda backend, ranks: [])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("ADASUM_HVD_GROUP_OP", "average")
    monkeypatch.setenv("ADASUM_HVD_TIMEOUT_SECONDS", "7")
    found = jobs.run("gloo", 2, "shown")
    assert not {"RANK", "ADASUM_HVD_GROUP_OP"} & found.keys()
    assert found["ADASUM_HVD_TIMEOUT_SECONDS"] == "7"


@pytest.mark.parametrize("words", ["", "torch,", "jax"])
def test_build_names_the_frameworks_that_it_knows(words: str, capsys) -> None:
    assert cli.main(["build", "--frameworks", words, "--no-install"]) == 1
    assert f"or torch,tensorflow, but got {words!r}" in capsys.readouterr().err


def test_a_demo_needs_a_folder(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--output", str(tmp_path / "file")]) == 1
    assert "pass one as --output" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["demo", "--epochs", "0"])


def test_a_reader_may_leave() -> None:
    """As `| head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "adasum_hvd", "hosts", "node[1-3]"]
    shown = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (shown.returncode, shown.stderr) == (1, b"")


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_decisions_of_the_kernel_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "10000 100000\n")
    write(tmp_path, "proc/sys/kernel/sched_autogroup_enabled", "1\n")
    found = {one.subject: one for one in machine.findings(root=tmp_path)}
    assert "grants 0.1" in found["processors"].found
    assert found["processors"].fix.startswith("start at most 1 ranks")
    assert "mpirun" in found["autogroup scheduling"].fix


SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
case $1 in
same) shift; exec "$@" ;;
old) echo adasum-hvd 0.0.1 ;;
*) echo "ssh: no route" >&2; exit 255 ;;
esac
"""


def test_doctor_names_the_launcher(monkeypatch) -> None:
    assert "none" in doctor.launcher().found
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert doctor.launcher().found == (
        "PMI (PMI_RANK=1, PMI_SIZE=2), inside Slurm (SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=1)"
    )
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    found = doctor.launcher()
    assert found.state == State.BROKEN and "unset those of the outer one" in found.fix


def test_hosts_are_asked_over_ssh(tmp_path: Path, monkeypatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_SSH_SECONDS", 100)
    assert machine.over_ssh("same").state is State.FINE
    assert machine.over_ssh("old").state is State.MISSING
    assert machine.over_ssh("gone") == DoctorFinding(
        "ssh gone",
        "ssh: no route",
        State.BROKEN,
        "make `ssh gone true` work without a password",
    )


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"adasum-hvd {adasum_hvd.__version__}\n"


# ---- bench ----


def measured(seconds: float) -> dict:
    rows = [
        {
            "case": "1 MB",
            "backend": "gloo",
            "operation": name,
            "seconds": [s, s, 9.0],
            "wrong": 0,
        }
        for name, s in ((bench.OURS, seconds), ("copy", 0.001))
    ]
    return {"ranks": 2, "machine": "here", "rows": rows}


def test_tables_and_comparisons_show_medians(tmp_path: Path, capsys) -> None:
    assert re.search(
        r"1 MB +gloo +copy .* \*\*2\.00x\*\*", bench.table(measured(0.002))
    )
    assert re.search(r"1 MB +gloo +copy .* 1\.00x$", bench.table(measured(0.001)), re.M)
    for name, seconds in (("a", 0.002), ("b", 0.004)):
        (tmp_path / name).write_text(json.dumps(measured(seconds)))
    (tmp_path / "list").write_text("[]")
    words = ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "list")]
    assert cli.main(words) == 1
    assert f"but got {tmp_path / 'list'}" in capsys.readouterr().err
    (tmp_path / "none").write_text(json.dumps(measured(0.002) | {"rows": []}))
    words = ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "none")]
    assert cli.main(words) == 1
    assert "but got no operation in both files" in capsys.readouterr().err
    words = ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(words) == 0
    output = capsys.readouterr().out
    assert re.search(r"AdaSum +2\.000 -> +4\.000 ms +2\.00x", output)
    assert re.search(r"copy +1\.000 -> +1\.000 ms +1\.00x", output)
    picture = bench.draw(measured(0.002), tmp_path / "picture.png")
    assert picture is not None and picture.stat().st_size > 5000


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "compare", "a"],
        ["bench", "a"],
        ["bench", "--ranks", "0"],
        ["bench", "--seconds", "inf"],
        ["bench", "--output", "x.png"],
        ["bench", "--output", "no/x.json"],
    ],
)
def test_bench_refuses(words: list[str], capsys) -> None:
    assert cli.main(words) == 1
    assert capsys.readouterr().err.startswith("adasum-hvd bench: expected ")


# ---- hosts ----


@pytest.mark.parametrize(
    ("text", "slots", "expected"),
    [
        ("node[1-3]", "2(x2),1", [("node1", 2), ("node2", 2), ("node3", 1)]),
        ("a1,b[09-10]-x,c", "8", [("a1", 8), ("b09-x", 8), ("b10-x", 8), ("c", 8)]),
        ("n[1-2] m\n", "1", [("n1", 1), ("n2", 1), ("m", 1)]),
        ("10.0.0.1:2,host-2", "4", [("10.0.0.1", 2), ("host-2", 4)]),
        ("one slots=3\n# none\ntwo slots=1 # last\n", "1", [("one", 3), ("two", 1)]),
    ],
)
def test_lists_of_hosts(tmp_path: Path, text: str, slots: str, expected: list) -> None:
    assert hosts.read(text, slots) == [Host(*pair) for pair in expected]
    path = tmp_path / "hosts"
    path.write_text(text)
    assert hosts.read(str(path), slots) == [Host(*pair) for pair in expected]


@pytest.mark.parametrize(
    ("text", "slots", "match"),
    [
        ("", "1", "expected names of hosts"),
        ("node[1-", "1", r"pairs of brackets in 'node\[1-', but got a single '\['"),
        ("node[01-04]]", "1", r"but got a single '\]'"),
        ("n[1-99999][1-9999]", "1", "at most 100000 hosts, but got more"),
        ("one slots=0", "1", "a number of slots of one, at least 1, but got '0'"),
        (
            "node[3-1]",
            "1",
            r"ranges such as \[01-12,17\] in node\[3-1\], but got '3-1'",
        ),
        ("node[1-99999999]", "1", "ranges such as"),
        ("a,b,a", "1", "each host once, as 'a slots=2' or 'a:2', but got a twice"),
        ("a\na\nb\n", "1", "got a twice; a node file of PBS .* sort FILE | uniq -c"),
        (
            "a slots=8 max_slots=9",
            "1",
            "no more than slots=N .*'a slots=8 max_slots=9'",
        ),
        ("a:0", "1", "a number of slots of a, at least 1, but got '0'"),
        ("a,b", "2(x3)", "one count for each of 2 hosts"),
        ("a", "x", r"a number or counts such as 2\(x3\),1, but got 'x'"),
        ("no/such_file", "1", "a host name or address, .* but got 'no/such_file'"),
    ],
)
def test_bad_lists_of_hosts(text: str, slots: str, match: str) -> None:
    with pytest.raises(hosts.ListError, match=match):
        hosts.read(text, slots)


def test_files_of_hosts_that_cannot_be_read(tmp_path: Path, capsys) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path, words in (
        (binary, "can't decode"),
        (tmp_path / "hosts.txt", "No such file"),
    ):
        assert cli.main(["hosts", str(path)]) == 1
        assert words in capsys.readouterr().err


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(hosts).failed == 0


# ---- timeline ----


def event(phase: str, at: int, tensor: int, name: str = "", **args: str) -> str:
    named = f', "name": "{name}"' if name else ""
    arguments = f', "args": {json.dumps(args)}' if args else ""
    return f'{{"ph": "{phase}"{named}, "ts": {at}, "pid": {tensor}{arguments}}}'


def two_fused_tensors(one: int = 1, other: int = 2) -> list[str]:
    """As Horovod writes them: both are in a phase at the same time."""
    described = {"dtype": "float32", "shape": "[250, 1000]"}
    return [
        event("B", 0, one, "NEGOTIATE"),
        event("E", 100, one),
        event("B", 100, one, "ALLREDUCE"),
        event("B", 110, other, "ALLREDUCE"),
        event("B", 200, one, "GRAM"),
        event("B", 200, other, "GRAM"),
        event("E", 700, one),
        event("E", 700, other),
        event("E", 1100, one, **described),
        event("E", 1100, other, **described),
    ]


@pytest.mark.parametrize("chunk", [60, 97, 1 << 20])
@pytest.mark.parametrize("end", ["]", "", ',{"ph": "B", "na'])
def test_phases_of_fused_tensors_count_once_in_time(chunk: int, end: str) -> None:
    file = io.StringIO('[\n{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "t"}},\n'
                       + ",".join(two_fused_tensors()) + end)  # fmt: skip
    phases, whole = timeline.summed(timeline.events(file, chunk))
    by_name = {phase.name: phase for phase in phases}
    assert whole == 1100 and phases[0].name == "ALLREDUCE"
    assert (by_name["ALLREDUCE"].count, by_name["ALLREDUCE"].microseconds) == (2, 1000)
    assert (by_name["GRAM"].count, by_name["GRAM"].microseconds) == (2, 500)
    assert by_name["GRAM"].bytes == by_name["ALLREDUCE"].bytes == 2_000_000
    assert re.search(r"GRAM +2 +0\.001 +45\.5% +4\.00", timeline.table(phases, whole))


@pytest.mark.parametrize(
    "text",
    [
        *("no timeline", "[1, 2]", '{"a": }, {"b": 1}', "[[{}]]", '[1, {}, {"b": 2}]'),
        *('[{"ph": "B", "ts": "x", "pid": 1}]', '[{"ph": "E"}]', "x" * 200_000),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_timeline_is_refused(text: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert cli.main(["timeline", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"adasum-hvd timeline: {path}: expected ")


@pytest.mark.parametrize(
    ("kept", "end", "cut"),
    [
        (10, "]", False),
        (10, "", True),
        (10, ',{"ph": "B", "na', True),
        (
            4,
            "]",
            True,
        ),  # each event has an end, but the job was killed within an operation
    ],
)
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_cut_timeline_is_summed_and_reported_as_cut(
    kept: int, end: str, cut: bool, words: list[str], tmp_path: Path, capsys
) -> None:
    path = tmp_path / "file"
    path.write_text("[\n" + ",".join(two_fused_tensors()[:kept]) + end)
    assert cli.main(["timeline", str(path), *words]) == 0
    shown = capsys.readouterr()
    assert "ALLREDUCE" in shown.out
    reported = f"adasum-hvd timeline: {path}: the file is cut: " in shown.err
    assert reported == cut and shown.err.count("\n") == cut


@pytest.mark.parametrize("text", ["", "\n", "[", "[\n", "[]", '[\n{"ph": "M"},\n'])
def test_a_timeline_without_operations_is_refused(
    text: str, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert cli.main(["timeline", str(path)]) == 1
    shown = capsys.readouterr()
    assert "expected operations, but the file has none" in shown.err and not shown.out


def test_a_long_timeline_needs_little_memory(tmp_path: Path) -> None:
    """All of it is one line, as of Horovod; the limit leaves no room for a third of it.

    Nor for what is known of each of so many tensors, which have no name and never come again.
    """
    path = tmp_path / "long.json"
    with path.open("w") as file:
        for k in range(32_000):
            file.write(
                ("," if k else "[\n") + ",".join(two_fused_tensors(2 * k, 2 * k + 1))
            )
    script = (
        "import resource, sys; from adasum_hvd import cli; "
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096; "
        "resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20),) * 2); "
        "sys.exit(cli.main(['timeline', sys.argv[1], '--json']))"
    )
    assert path.stat().st_size > 12 << 20
    shown = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout)["phases"][0]["count"] == 64_000
