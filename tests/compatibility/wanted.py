"""Tests of Horovod that pass with Horovod's module and not with ours, on purpose, and why.

An entry stands for the test and its sub-tests, on every backend that is run. One that no
longer differs is an error: take it out.
"""

WANTED: dict[str, str] = {}
