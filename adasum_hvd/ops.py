"""Public path of the reduction ops: see :mod:`adasum_hvd.base.ops`."""

from adasum_hvd.base.ops import *  # noqa: F403
from adasum_hvd.base.ops import __all__ as __all__
