"""The former place of `adasum_hvd.adam_offload`, which pickled optimizers name."""

from adasum_hvd.adam_offload import AdamOffload as AdamOffload
from adasum_hvd.adam_offload import __path__ as __path__
