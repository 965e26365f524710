"""MindSpore's boost switch: see :mod:`adasum_hvd.mindspore.boost`."""

from adasum_hvd.mindspore.boost import *  # noqa: F403
