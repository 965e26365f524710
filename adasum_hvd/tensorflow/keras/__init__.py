"""`horovod.tensorflow.keras` that reduces: `import adasum_hvd.tensorflow.keras as hvd`."""

from typing import TYPE_CHECKING as _CHECKING
from typing import Any as _Any

from adasum_hvd.base import namespaces as _names
from adasum_hvd.offload.keras import AdamOffload as AdamOffload
from adasum_hvd.tensorflow import *
from adasum_hvd.tensorflow.keras import callbacks as callbacks
from adasum_hvd.tensorflow.keras.collectives import allgather as allgather
from adasum_hvd.tensorflow.keras.collectives import allreduce as allreduce
from adasum_hvd.tensorflow.keras.collectives import broadcast as broadcast
from adasum_hvd.tensorflow.keras.collectives import reducescatter as reducescatter
from adasum_hvd.tensorflow.keras.models import (
    DistributedOptimizer as DistributedOptimizer,
)
from adasum_hvd.tensorflow.keras.models import (
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from adasum_hvd.tensorflow.keras.models import compile as compile
from adasum_hvd.tensorflow.keras.models import load_model as load_model
from adasum_hvd.tensorflow.mindspore import (
    AdaSumByDeltaWeightWrapCell as AdaSumByDeltaWeightWrapCell,
)
from adasum_hvd.tensorflow.mindspore import AdaSumByGradWrapCell as AdaSumByGradWrapCell

# After the star import, which has the module without Keras.
import adasum_hvd.tensorflow.keras.elastic as elastic  # isort: skip

if _CHECKING:

    def __getattr__(name: str) -> _Any:
        """Horovod's names have no types."""
else:
    __all__ = _names.public(globals())  # Horovod's names, too
