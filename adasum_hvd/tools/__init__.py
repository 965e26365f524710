"""Commands of `adasum-hvd` except `build` and `exec`: doctor, bench, demo, plot, timeline, hosts.

Each command has a file of its name. The programs of its ranks are `torch_*.py` and
`tensorflow_*.py`; only these import a framework.
"""
