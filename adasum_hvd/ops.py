"""Public path of the reduction ops: see :mod:`adasum_hvd.common.ops`."""

from adasum_hvd.common.ops import *  # noqa: F403
from adasum_hvd.common.ops import __all__ as __all__
