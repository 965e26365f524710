"""`horovod.tensorflow` with an AdaSum that works: `import adasum_hvd.tensorflow as hvd`."""

from typing import TYPE_CHECKING as _CHECKING
from typing import Any as _Any

from adasum_hvd.base import namespaces as _names
from adasum_hvd.horovod import preflight as _installed

_installed.require_horovod("tensorflow")

from horovod.tensorflow import *
from horovod.tensorflow import _executing_eagerly as _executing_eagerly

import adasum_hvd.tensorflow.elastic as elastic  # not Horovod's, which the star has brought
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
from adasum_hvd.tensorflow.broadcasting import allgather_object as allgather_object
from adasum_hvd.tensorflow.broadcasting import (
    broadcast_variables as broadcast_variables,
)
from adasum_hvd.tensorflow.mindspore import (
    DistributedGradReducer as DistributedGradReducer,
)
from adasum_hvd.tensorflow.monitor import AdasumMonitor as AdasumMonitor
from adasum_hvd.tensorflow.ops import SyncBatchNormalization as SyncBatchNormalization
from adasum_hvd.tensorflow.ops import allreduce as allreduce
from adasum_hvd.tensorflow.ops import counters as counters
from adasum_hvd.tensorflow.ops import grouped_allreduce as grouped_allreduce
from adasum_hvd.tensorflow.ops import init as init
from adasum_hvd.tensorflow.ops import join as join
from adasum_hvd.tensorflow.ops import settings as settings
from adasum_hvd.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from adasum_hvd.tensorflow.optimizer import banner as banner
from adasum_hvd.tensorflow.replicas import ReplicaMismatch as ReplicaMismatch
from adasum_hvd.tensorflow.replicas import check_replicas as check_replicas
from adasum_hvd.tensorflow.tape import (
    DistributedGradientTape as DistributedGradientTape,
)
from adasum_hvd.tensorflow.tape import (
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)

if _CHECKING:

    def __getattr__(name: str) -> _Any:
        """Horovod's names have no types."""
else:
    __all__ = _names.public(globals())  # Horovod's names, too
