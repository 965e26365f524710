"""Public path of `adasum_lr`: see :mod:`adasum_hvd.advice.learning_rate`."""

from adasum_hvd.advice.learning_rate import *  # noqa: F403
from adasum_hvd.advice.learning_rate import __all__ as __all__
