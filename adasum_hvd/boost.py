"""MindSpore's boost switch: see :mod:`adasum_hvd.mindspore.boost`."""

from adasum_hvd.mindspore.boost import *  # noqa: F403
from adasum_hvd.mindspore.boost import __all__ as __all__
