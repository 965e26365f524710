"""A former place of Keras's `AdamOffload`, which pickled optimizers name."""

from adasum_hvd.offload.keras import AdamOffload as AdamOffload
from adasum_hvd.offload.keras import RateFunction as RateFunction
from adasum_hvd.offload.keras import RateVector as RateVector
