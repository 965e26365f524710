"""`horovod.tensorflow` with an AdaSum that works: `import adasum_hvd.tensorflow as hvd`."""

from typing import TYPE_CHECKING as _CHECKING
from typing import Any as _Any

from adasum_hvd.base import namespaces as _names
from adasum_hvd.horovod import preflight as _installed

_installed.require_horovod("tensorflow")

from horovod.tensorflow import *
from horovod.tensorflow import _executing_eagerly as _executing_eagerly

import adasum_hvd.tensorflow.elastic as elastic  # not Horovod's, which the star has brought
from adasum_hvd.advice.learning_rate import adasum_lr
from adasum_hvd.advice.run import Advice, advise
from adasum_hvd.base.marks import mark_worker_local
from adasum_hvd.base.ops import (
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
from adasum_hvd.tensorflow.monitor import AdasumMonitor
from adasum_hvd.tensorflow.ops import (
    SyncBatchNormalization,
    allreduce,
    counters,
    grouped_allreduce,
    init,
    join,
    settings,
)
from adasum_hvd.tensorflow.optimizer import DistributedOptimizer, banner
from adasum_hvd.tensorflow.replicas import ReplicaMismatch, check_replicas
from adasum_hvd.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)

__all__ = [
    "Adasum",
    "AdasumDelta",
    "AdasumGrad",
    "AdasumMonitor",
    "Advice",
    "Average",
    "DistributedGradReducer",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "Product",
    "ReduceOp",
    "ReplicaMismatch",
    "Sum",
    "SyncBatchNormalization",
    "adasum_lr",
    "advise",
    "allgather_object",
    "allreduce",
    "banner",
    "broadcast_variables",
    "check_replicas",
    "counters",
    "elastic",
    "grouped_allreduce",
    "init",
    "join",
    "mark_worker_local",
    "settings",
]
__all__ += _names.public(globals())  # Horovod's, which are not listed

if _CHECKING:

    def __getattr__(name: str) -> _Any:
        """Horovod's names have no types."""
