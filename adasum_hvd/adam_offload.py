"""torch's `AdamOffload`: see :mod:`adasum_hvd.offload.optimizer`."""

from adasum_hvd.offload.optimizer import AdamOffload as AdamOffload
