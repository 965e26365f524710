"""`horovod.tensorflow.keras` that reduces: `import adasum_hvd.tensorflow.keras as hvd`."""

from typing import TYPE_CHECKING as _CHECKING
from typing import Any as _Any

from adasum_hvd.base import namespaces as _names
from adasum_hvd.offload.keras import AdamOffload
from adasum_hvd.tensorflow import *
from adasum_hvd.tensorflow.keras import callbacks
from adasum_hvd.tensorflow.keras.collectives import (
    allgather,
    allreduce,
    broadcast,
    reducescatter,
)
from adasum_hvd.tensorflow.keras.models import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    compile,
    load_model,
)
from adasum_hvd.tensorflow.mindspore import (
    AdaSumByDeltaWeightWrapCell,
    AdaSumByGradWrapCell,
)

# After the star import, which has the module without Keras.
import adasum_hvd.tensorflow.keras.elastic as elastic  # type: ignore[no-redef]  # isort: skip

__all__ = [
    "AdaSumByDeltaWeightWrapCell",
    "AdaSumByGradWrapCell",
    "AdamOffload",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "callbacks",
    "compile",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += _names.public(globals())  # Horovod's, which are not listed

if _CHECKING:

    def __getattr__(name: str) -> _Any:
        """Horovod's names have no types."""
