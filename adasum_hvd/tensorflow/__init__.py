"""`horovod.tensorflow` with an AdaSum that works: `import adasum_hvd.tensorflow as hvd`."""

from adasum_hvd import installed as _installed

_installed.require_horovod("tensorflow")

from horovod.tensorflow import *
from horovod.tensorflow import _executing_eagerly as _executing_eagerly

import adasum_hvd.tensorflow.elastic as elastic  # not Horovod's, which the star has brought
from adasum_hvd.learning_rate import adasum_lr
from adasum_hvd.marks import mark_worker_local
from adasum_hvd.ops import (
    Adasum,
    AdasumDelta,
    AdasumGrad,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
)
from adasum_hvd.tensorflow.broadcasting import allgather_object, broadcast_variables
from adasum_hvd.tensorflow.mindspore import DistributedGradReducer
from adasum_hvd.tensorflow.ops import (
    allreduce,
    counters,
    grouped_allreduce,
    init,
    settings,
)
from adasum_hvd.tensorflow.optimizer import DistributedOptimizer, banner
from adasum_hvd.tensorflow.replicas import ReplicaMismatch, check_replicas
from adasum_hvd.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
