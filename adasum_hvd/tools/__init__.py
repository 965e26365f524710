"""What `adasum-hvd` does besides building: doctor, bench, demo, timeline, hosts.

Each command has a file of its name. Programs that its ranks run are `torch_*.py` and
`tensorflow_*.py`; only these import a framework.
"""
