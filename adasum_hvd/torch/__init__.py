"""`horovod.torch` with AdaSum for any number of ranks: `import adasum_hvd.torch as hvd`."""

from typing import TYPE_CHECKING as _CHECKING
from typing import Any as _Any

from adasum_hvd.base import namespaces as _namespaces
from adasum_hvd.horovod import preflight as _preflight

_preflight.require_horovod("torch")

from horovod.torch import *
from horovod.torch.mpi_ops import is_homogeneous as is_homogeneous

import adasum_hvd.torch.elastic as elastic  # replaces Horovod's, imported by the star
from adasum_hvd.advice.learning_rate import adasum_lr as adasum_lr
from adasum_hvd.advice.run import Advice as Advice
from adasum_hvd.advice.run import advise as advise
from adasum_hvd.base.marks import mark_worker_local as mark_worker_local
from adasum_hvd.base.ops import Adasum as Adasum
from adasum_hvd.base.ops import AdasumDelta as AdasumDelta
from adasum_hvd.base.ops import AdasumGrad as AdasumGrad
from adasum_hvd.base.ops import Average as Average
from adasum_hvd.base.ops import Max as Max
from adasum_hvd.base.ops import Min as Min
from adasum_hvd.base.ops import Product as Product
from adasum_hvd.base.ops import ReduceOp as ReduceOp
from adasum_hvd.base.ops import Sum as Sum
from adasum_hvd.offload.optimizer import AdamOffload as AdamOffload
from adasum_hvd.torch.amp import GradScaler as GradScaler
from adasum_hvd.torch.broadcasting import (
    broadcast_optimizer_state as broadcast_optimizer_state,
)
from adasum_hvd.torch.broadcasting import broadcast_parameters as broadcast_parameters
from adasum_hvd.torch.compression import Compression as Compression
from adasum_hvd.torch.marks import mark_replicated_over as mark_replicated_over
from adasum_hvd.torch.mindspore import (
    AdaSumByDeltaWeightWrapCell as AdaSumByDeltaWeightWrapCell,
)
from adasum_hvd.torch.mindspore import AdaSumByGradWrapCell as AdaSumByGradWrapCell
from adasum_hvd.torch.mindspore import DistributedGradReducer as DistributedGradReducer
from adasum_hvd.torch.monitor import AdasumMonitor as AdasumMonitor
from adasum_hvd.torch.objects import allgather_object as allgather_object
from adasum_hvd.torch.objects import broadcast_object as broadcast_object
from adasum_hvd.torch.ops import allreduce as allreduce
from adasum_hvd.torch.ops import allreduce_ as allreduce_
from adasum_hvd.torch.ops import allreduce_async as allreduce_async
from adasum_hvd.torch.ops import allreduce_async_ as allreduce_async_
from adasum_hvd.torch.ops import counters as counters
from adasum_hvd.torch.ops import grouped_allreduce as grouped_allreduce
from adasum_hvd.torch.ops import grouped_allreduce_ as grouped_allreduce_
from adasum_hvd.torch.ops import grouped_allreduce_async as grouped_allreduce_async
from adasum_hvd.torch.ops import grouped_allreduce_async_ as grouped_allreduce_async_
from adasum_hvd.torch.ops import init as init
from adasum_hvd.torch.ops import settings as settings
from adasum_hvd.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from adasum_hvd.torch.optimizer.checks import join as join
from adasum_hvd.torch.replicas import ReplicaMismatch as ReplicaMismatch
from adasum_hvd.torch.replicas import banner as banner
from adasum_hvd.torch.replicas import check_replicas as check_replicas
from adasum_hvd.torch.sparse import sparse_allreduce_async as sparse_allreduce_async
from adasum_hvd.torch.wire import poll as poll
from adasum_hvd.torch.wire import synchronize as synchronize

if _CHECKING:

    def __getattr__(name: str) -> _Any:
        """Horovod's names have no types."""
else:
    __all__ = _namespaces.public(globals())  # Horovod's names, too
