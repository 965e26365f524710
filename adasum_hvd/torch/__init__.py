"""`horovod.torch` with AdaSum for any number of ranks: `import adasum_hvd.torch as hvd`."""

from typing import TYPE_CHECKING as _CHECKING
from typing import Any as _Any

from adasum_hvd.base import namespaces as _namespaces
from adasum_hvd.horovod import preflight as _preflight

_preflight.require_horovod("torch")

from horovod.torch import *
from horovod.torch.mpi_ops import is_homogeneous as is_homogeneous

import adasum_hvd.torch.elastic as elastic  # replaces Horovod's, imported by the star
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
from adasum_hvd.offload.optimizer import AdamOffload
from adasum_hvd.torch.amp import GradScaler
from adasum_hvd.torch.broadcasting import (
    broadcast_optimizer_state,
    broadcast_parameters,
)
from adasum_hvd.torch.compression import Compression
from adasum_hvd.torch.marks import mark_replicated_over
from adasum_hvd.torch.mindspore import (
    AdaSumByDeltaWeightWrapCell,
    AdaSumByGradWrapCell,
    DistributedGradReducer,
)
from adasum_hvd.torch.monitor import AdasumMonitor
from adasum_hvd.torch.objects import allgather_object, broadcast_object
from adasum_hvd.torch.ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    counters,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    init,
    settings,
)
from adasum_hvd.torch.optimizer import DistributedOptimizer
from adasum_hvd.torch.optimizer.checks import join
from adasum_hvd.torch.replicas import ReplicaMismatch, banner, check_replicas
from adasum_hvd.torch.sparse import sparse_allreduce_async
from adasum_hvd.torch.wire import poll, synchronize

__all__ = [
    "AdaSumByDeltaWeightWrapCell",
    "AdaSumByGradWrapCell",
    "AdamOffload",
    "Adasum",
    "AdasumDelta",
    "AdasumGrad",
    "AdasumMonitor",
    "Advice",
    "Average",
    "Compression",
    "DistributedGradReducer",
    "DistributedOptimizer",
    "GradScaler",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "ReplicaMismatch",
    "Sum",
    "adasum_lr",
    "advise",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "banner",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_replicas",
    "counters",
    "elastic",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "join",
    "mark_replicated_over",
    "mark_worker_local",
    "poll",
    "settings",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += _namespaces.public(globals())  # Horovod's names

if _CHECKING:

    def __getattr__(name: str) -> _Any:
        """Horovod's names have no types."""
