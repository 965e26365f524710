"""Commands of `adasum-hvd`, one a file; only the programs `torch_*.py` import a framework."""
