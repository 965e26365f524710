"""`horovod.tensorflow.keras` that reduces: `import adasum_hvd.tensorflow.keras as hvd`."""

from adasum_hvd.tensorflow import *
from adasum_hvd.tensorflow.adam_offload import AdamOffload
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

# Behind the star, which brings the one without Keras.
import adasum_hvd.tensorflow.keras.elastic as elastic  # type: ignore[no-redef]  # isort: skip
