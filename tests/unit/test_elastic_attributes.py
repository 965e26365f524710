"""Attributes of an elastic state as bytes, as ranks of one program send them."""

from __future__ import annotations

import subprocess
import sys

# Ranks run the same main module, and a copy of its functions would use copies of its globals.
PROGRAM = """
from adasum_hvd.horovod.elastic.attributes import pack, unpack

trained = object()

class Meter:
    class Unit:
        def read(self):
            return trained

def train():
    return trained

def closure(held):
    return lambda: (held, train())

kept = {"unit": Meter.Unit(), "call": train, "closure": closure([3]), "type": Meter}
found = dict(unpack(pack("State", kept, lambda obj: obj is trained)))
assert type(found["unit"]) is Meter.Unit and found["unit"].read() is trained
assert found["call"] is train and found["type"] is Meter
assert found["closure"]()[0] == [3]
try:
    pack("State", {"a": 1, "b": closure([trained])}, lambda obj: obj is trained)
except TypeError as error:
    assert "State: expected attributes that pickle, but got b (function)" in str(error)
else:
    raise AssertionError("a copy of what is trained")
"""


def test_functions_and_classes_of_the_main_module_are_not_copied() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
