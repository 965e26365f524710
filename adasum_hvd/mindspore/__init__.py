"""MindSpore's names; all but `torch_checkpoint.py` without a framework."""
