"""The monitor without ranks: statistics, sinks and plots."""

from __future__ import annotations

import json
import math
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from adasum_hvd import cli
from adasum_hvd.monitor import files, sinks
from adasum_hvd.monitor.statistics import NAMES, statistics, width


def record(step: int, **tensors: float | None) -> dict:
    by_name = {name: dict.fromkeys(NAMES, value) for name, value in tensors.items()}
    return {
        "step": step,
        "time": 1e9 + step,
        "ranks": 4,
        "joined": 2,
        "tensors": by_name,
    }


# ---- statistics ----


def test_one_level() -> None:
    # Orthogonal vectors of norms 3 and 4: a sum of norm 5, a mean of norm 2.5.
    rows = np.array([[0, 1, 5, 2.5, 5, 1, 1], [0, 0, 0, 0, 0, 0, 0]])
    assert width([2]) == rows.shape[1]
    found = statistics(rows, [2])
    assert list(found) == list(NAMES)
    # Sum of squares 25 and squared mean 6.25: only noise.
    assert [found[name][0] for name in NAMES] == [0, 1, 2, 1, 1, 12.5, 0, 5]
    assert all(math.isnan(found[name][1]) for name in NAMES[:3])
    assert found["variance"][1] == found["length"][1] == 0


def test_two_levels() -> None:
    # Two groups of two equal vectors (of norms 1 and 2), which are orthogonal to one another.
    inner = [
        [1, 1, math.sqrt(2), 1, 1, 0.5, 0.5],
        [1, 1, math.sqrt(8), 2, 2, 0.25, 0.75],
    ]
    # The combination 1 and 0.5 of (1, 0) and (0, 2).
    outer = [0, 1, math.sqrt(5), math.sqrt(5) / 2, math.sqrt(2), 1, 0.5]
    rows = np.array([[*inner[0], *inner[1], *outer]])
    assert width([2, 2]) == rows.shape[1]
    found = {name: value[0] for name, value in statistics(rows, [2, 2]).items()}
    assert found["cosine"] == pytest.approx(2 / 3)
    assert found["orthogonality"] == pytest.approx(0.5 * 2 / 5)
    assert found["gain"] == pytest.approx(2 * math.sqrt(2 / 5))
    assert (found["lowest"], found["highest"]) == (0.125, 0.5)
    # The vectors of a group are equal: no noise, and the mean of 1 and 4.
    assert found["variance"] == pytest.approx(0)
    assert found["squared_mean"] == pytest.approx(2.5)
    assert found["length"] == pytest.approx(math.sqrt(2))


def test_norms_whose_squares_overflow() -> None:
    rows = np.array([[0, 1, 5e300, 2.5e300, 5e300, 1, 1]] * 2)
    assert statistics(rows, [2])["orthogonality"].tolist() == [1, 1]


# ---- sinks ----


def test_paths_functions_and_folders(tmp_path: Path) -> None:
    got: list = []
    to = sinks.Sinks([tmp_path / "new" / "run.jsonl", got.append])
    for step in (1, 2):
        to(record(step, a=0.5, b=None))
    to.close()
    lines = (tmp_path / "new" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == got
    assert got[1]["step"] == 2 and got[0]["tensors"]["b"]["gain"] is None
    (tmp_path / "one.jsonl").touch()
    one = sinks.Sinks(str(tmp_path / "one.jsonl"))
    one(record(3))
    assert json.loads((tmp_path / "one.jsonl").read_text())["step"] == 3


def test_a_sink_that_fails_is_removed(tmp_path: Path) -> None:
    def full(one: dict) -> None:
        raise OSError("no space left")

    got: list = []
    to = sinks.Sinks([full, got.append])
    with pytest.warns(
        UserWarning, match="gets no more records: OSError: no space left"
    ):
        to(record(1))
    to(record(2))
    assert [one["step"] for one in got] == [1, 2]


def test_a_record_that_was_cut_ends_a_run(tmp_path: Path, capsys) -> None:
    file = written(tmp_path / "run.jsonl", record(1, a=0.5), record(2, a=0.5))
    file.write_text(file.read_text() + '{"step": 3, "joi')
    assert [one["step"] for one in files.records(file)] == [1, 2]
    to = sinks.Sinks(file)
    to(record(4, b=0.5))
    to(record(5, b=0.5))
    file.write_text(file.read_text() + "\n")  # a line without anything
    assert [one["step"] for one in files.records(file)] == [4, 5]


def test_a_run_that_begins_with_the_step_before_it(tmp_path: Path) -> None:
    """As if nothing had counted the steps."""
    uncounted = written(tmp_path / "a.jsonl", *(record(0, a=0.5) for _ in range(4)))
    with pytest.warns(UserWarning, match=r"has its first step, 0, too.*rising numbers"):
        assert len(files.records(uncounted)) == 1
    steps = (0, 0, 50, 100, 50, 100)  # the latest run is counted
    counted = written(tmp_path / "b.jsonl", *(record(step, a=0.5) for step in steps))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [one["step"] for one in files.records(counted)] == [50, 100]


def test_folders_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file/run.jsonl", "file", "file/events"):
        with pytest.raises(ValueError, match="a folder that exists or can be created"):
            sinks.Sinks(tmp_path / name)


def test_wrong_sinks(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(TypeError, match=r"expected paths that end in \.jsonl.*got 7"):
        sinks.Sinks([7])
    folder = tmp_path / "a.jsonl"
    folder.mkdir()
    with pytest.raises(ValueError, match="a file that can be written"):
        sinks.Sinks(folder)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"expected the package tensorboard.*got none"):
        sinks.Sinks(tmp_path / "events")


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event

    to = sinks.Sinks(tmp_path / "events")
    one = record(50, **{"layer.weight": 0.75, "layer.bias": None})
    to(one | {"noise_scale": 3.0, "lengthening": None})
    to.close()
    (file,) = (tmp_path / "events").iterdir()
    data, found = file.read_bytes(), {}
    while data:  # length, its checksum, the event, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found |= {value.tag: (event.step, value) for value in event.summary.value}
        data = data[16 + length :]
    of_tensor = {f"adasum/{name}/layer.weight" for name in NAMES}
    assert set(found) == of_tensor | {"adasum/noise_scale"}
    step, value = found["adasum/orthogonality/layer.weight"]
    assert step == 50 and value.simple_value == 0.75


# ---- plot ----


def written(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_plot_draws_the_latest_run(tmp_path: Path, capsys) -> None:
    file = written(
        tmp_path / "run.jsonl",
        record(50, old=0.5),
        record(100, old=0.5),
        record(50, first=0.5, second=1.0),
        record(100, first=0.6),
        record(150, first=None, second=0.9),
    )
    assert [one["step"] for one in files.records(file)] == [50, 100, 150]
    assert cli.main(["plot", str(file)]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    target = tmp_path / "other.svg"
    assert cli.main(["plot", str(file), "-o", str(target)]) == 0
    text = target.read_text()
    assert "<!-- second -->" in text and "<!-- old -->" not in text
    assert str(target) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got none in"),
        ('{"step": 1, "joined": 2, "tensors": {}}\n', "got none in"),
        ("no json\n", "a record of hvd.AdasumMonitor in line 1 of"),
        (
            '{"step": 1, "tensors": {"a": 3}}\n',
            "a record of hvd.AdasumMonitor in line 1 of",
        ),
    ],
)
def test_plot_of_something_else(tmp_path: Path, capsys, text, message) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text(text)
    assert cli.main(["plot", str(file)]) == 1
    assert message in capsys.readouterr().err


def test_plot_without_a_file_or_matplotlib(tmp_path, capsys, monkeypatch) -> None:
    assert cli.main(["plot", str(tmp_path / "none.jsonl")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["plot", "."]) == 1
    assert "Is a directory" in capsys.readouterr().err
    file = written(tmp_path / "run.jsonl", record(1, a=0.5))
    assert cli.main(["plot", str(file), "-o", str(tmp_path / "a.nosuch")]) == 1
    assert "nosuch" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["plot", str(file)]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
