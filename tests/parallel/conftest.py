"""The files of cases are run by ranks: harness/launch.py."""

collect_ignore = ["cases"]
