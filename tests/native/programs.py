"""The test programs in C++; run as a program, it compiles all of them.

    python -m tests.native.programs [FORM ...]

They take minutes of both processors, once for each state of the sources: `compiling.py`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from adasum_hvd.horovod.build.sources import INCLUDES
from tests.native import compiling, rooms
from tests.native.rooms import SIMULATED, X86

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Program:
    """A test program, for ranks on hosts or on simulated devices."""

    source: str
    on_device: bool = False

    def sources(self) -> dict[Path, tuple[str, ...]]:
        """Return what to compile, each file with flags of its own."""
        found = dict(rooms.ARITHMETIC)
        if self.on_device:
            found |= rooms.KERNELS
            found |= rooms.SIMULATED_DEVICE
        # A test that is on no list is a function that nothing uses.
        own = (*(_ON_DEVICE if self.on_device else ()), "-Werror=unused-function")
        return found | {TESTS / self.source: own}


_ON_DEVICE = ("-DADASUM_ON_DEVICE", "-DADASUM_SIMULATED", "-DADASUM_WITH_NCCL")
PROGRAMS = {
    path.stem: Program(path.name)
    for path in sorted(TESTS.glob("test_*.cc"))
    if path.stem != "test_device"
} | {
    # The same tests on devices, which here are simulated; tests/gpu has the real ones.
    "device_reduce": Program("test_reduce.cc", on_device=True),
    "device_trees": Program("test_trees.cc", on_device=True),
    "device_limits": Program("test_device.cc", on_device=True),
    "device_observation": Program("test_observation.cc", on_device=True),
}
FORMS = {
    "plain": [],
    "asan-ubsan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-fsanitize=thread"],
}


def _flags(form: str) -> list[str]:
    """Return the injected CMake's flags, and a form's.

    Under sanitizers less optimized: that compiles in half the time and runs no slower.
    """
    flags = ["-std=c++17", "-g1", "-pthread", "-O1" if FORMS[form] else "-O2", "-fPIC"]
    flags += ["-ffp-contract=off", "-Wno-psabi", "-Wno-unknown-pragmas", *FORMS[form]]
    return [*flags, *INCLUDES, f"-I{TESTS}", f"-I{SIMULATED}"]


def objects(sources: Mapping[Path, Sequence[str]], form: str) -> list[Path]:
    """Compile sources that need nothing of Horovod; all programs of a form share the objects."""
    return compiling.objects(sources, _flags(form), f"tests/{form}")


def build(name: str, form: str) -> Path:
    """Return a program in a form. A second call compiles nothing."""
    compiled = objects(PROGRAMS[name].sources(), form)
    return compiling.linked(compiled, _flags(form), [], f"tests/{form}", name)


# A kernel's threads are fibers, which the thread sanitizer does not know; and what is observed
# is no thread's business but one's.
COMBINATIONS = [
    (name, form)
    for name in PROGRAMS
    for form in FORMS
    if form != "tsan" or not (name.startswith("device") or name == "test_observation")
]


def runs_here(name: str) -> bool:
    """Return whether a program is for this processor: the simulated device is for x86-64."""
    return X86 or not name.startswith("device")


def main(chosen: Sequence[str]) -> None:
    """Build every program in these forms and the simulated Horovod, with a line about each.

    Those of one form share objects, so they are made one after the other.
    """
    from tests.parallel.harness import simulated_horovod

    forms: dict[str, dict[str, Callable[[], Path]]] = {form: {} for form in chosen}
    for name, form in COMBINATIONS:
        if form in forms and runs_here(name):
            forms[form][f"{name}, {form}"] = partial(build, name, form)
    if X86 and "plain" in forms:
        forms["plain"]["simulated Horovod"] = simulated_horovod.make
    total, done = sum(map(len, forms.values())), itertools.count(1)
    begin, end = ("\r\033[K", "") if sys.stdout.isatty() else ("", "\n")

    def make_all(makes: dict[str, Callable[[], Path]]) -> None:
        for name, make in makes.items():
            try:
                make()
            except subprocess.CalledProcessError:  # of which the compiler has told
                print(f"{name}: not compiled; its tests will fail", file=sys.stderr)
            line = f"test programs {next(done)}/{total} {name}"
            print(f"{begin}{line}", end=end, flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make_all, forms.values()))
    print(end="\n" * sys.stdout.isatty())


if __name__ == "__main__":
    main(sys.argv[1:] or list(FORMS))
