"""A former place of `AdamOffload`, which pickled optimizers name."""

from adasum_hvd.offload.optimizer import AdamOffload as AdamOffload
