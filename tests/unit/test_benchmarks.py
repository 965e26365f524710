"""Benchmarks record the origin of their figures; the planner agrees with its cost model."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import compiled
import cost_model
import exchange
import gpu
import jobs

from tests.native import programs, rooms

BENCHMARKS = Path(jobs.__file__).parent
_PLANNER = """
#include "reduce/plan.h"
#include <cstdlib>
#include <iostream>
using namespace adasum_hvd;
int main(int count, char** words) {
  for (int k = 1; k + 1 < count; k += 2) {
    std::vector<int> hosts(std::atoi(words[k]));
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      hosts[rank] = static_cast<int>(rank) / std::atoi(words[k + 1]);
    }
    std::cout << Describe(PlanLevels(hosts, GroupOp::kAdasum, 0, 0, {})) << "\\n";
  }
}
"""


def test_ratios_that_lose_are_bold():
    assert [jobs.ratio(x) for x in (0.951, 1.004, 1.006)] == [
        "0.95x",
        "1.00x",
        "**1.01x**",
    ]


def test_figures_come_with_versions_and_hardware():
    machine = jobs.machine()
    assert machine["processor"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**28
    for package in ("torch", "horovod"):
        assert machine[package] == metadata.version(package)
    kept = sorted((BENCHMARKS.parent / "docs/convergence/raw").glob("*.jsonl"))
    assert kept
    for path in kept:
        for line in path.read_text().splitlines():
            found = json.loads(line)["machine"]
            assert {"processor", "cores", "python", "torch"} <= found.keys(), path


def test_the_op_plans_what_the_model_says(tmp_path):
    clusters = [  # ranks, ranks on a host
        (2, 1), (8, 1), (64, 1), (1024, 1), (4, 2), (16, 2), (64, 4), (512, 4),
        (8, 8), (16, 8), (32, 8), (64, 8), (128, 8), (512, 8), (1024, 8), (4096, 8),
    ]  # fmt: skip
    source = tmp_path / "planner.cc"
    source.write_text(_PLANNER)
    planned = compiled.output_of(
        source,
        programs.objects(rooms.sources("reduce/plan.cc", "reduce/tree.cc"), "plain"),
        [[number for cluster in clusters for number in cluster]],
    )
    modelled = []
    for ranks, on_host in clusters:
        defaults = cost_model.make_parser().parse_args(
            ["--ranks-per-host", str(on_host)]
        )
        levels = cost_model.planned_levels(cost_model.machine_of(defaults), ranks)
        modelled.append(" x ".join(str(level.radix) for level in levels))
    assert planned.splitlines() == modelled
    assert len(set(modelled)) > 8


def test_the_page_of_the_cost_model_has_its_predictions(capsys, monkeypatch):
    page = (BENCHMARKS.parent / "docs/cost_model.md").read_text()
    monkeypatch.setattr("sys.argv", ["cost_model.py"])
    cost_model.main()
    predicted = capsys.readouterr().out.splitlines()
    shown = re.findall(r"^\| (?:1|100) \|.*", page, re.M)
    assert len(shown) > 10
    assert set(shown) <= set(predicted)
    for delay in (0, 1):  # of the hosts that were measured: 1 Gbit/s, two ranks each
        words = ["--ranks-per-host", "2", "--gigabits", "1"]
        latency = ["--latency-us", str(50 + 1000 * delay)]
        machine = cost_model.machine_of(
            cost_model.make_parser().parse_args(words + latency)
        )
        levels = cost_model.planned_levels(machine, 4)
        where = f"2 hosts x 2, {'1 ms' if delay else 'no delay'}"
        for name, seconds in (
            ("AdaSum, levels", cost_model.levels_seconds(machine, levels, 25e6)),
            ("AdaSum, flat", cost_model.flat_seconds(machine, 4, 25e6)),
            ("average", cost_model.ring_seconds(machine, 4, 25e6)),
        ):
            assert f"| 25 MB | {where} | {name} | {seconds * 1e3:.0f} |" in page


def test_exchanges_of_short_messages():
    compiled_parts = programs.objects(rooms.sources("host"), "plain")
    rows = exchange.measure([2, 3], [1, 100_000], 20, compiled_parts)
    assert [(row["ranks"], row["bytes"], row["sessions"]) for row in rows] == [
        (ranks, size, sessions)
        for ranks in (2, 3)
        for size in (1, 100_000)
        for sessions in ("one", "each")
    ]
    for row in rows:
        assert 0 < row["median"] <= row["p90"]


def test_a_trace_names_the_surroundings_of_a_call_that_waits():
    names = ("cudaMallocAsync", "cudaDeviceSynchronize", "cudaEventRecord")
    events = [
        {"cat": "cuda_runtime", "tid": 1, "ts": 10 - place, "name": name}
        for place, name in enumerate(reversed(names))
    ]
    main = {"cat": "cuda_runtime", "tid": 2, "name": "cudaDeviceSynchronize"}
    of_profiler = [main | {"ts": 12}, main | {"tid": 3, "ts": 21}]
    round_of = {"cat": gpu.ANNOTATION, "name": gpu.ROUND, "tid": 2, "ts": 1, "dur": 19}
    found = gpu.calls_of([*events, *of_profiler, {"name": "metadata"}, round_of])
    assert found["calls"] == dict.fromkeys(names, 1)
    (waiting,) = found["waiting"]
    assert waiting["call"] == "cudaDeviceSynchronize"
    assert (waiting["before"], waiting["after"]) == ([names[0]], [names[2]])
    assert gpu.shortfalls({"trace": found}) == [
        "cudaDeviceSynchronize is called 1 times"
    ]
