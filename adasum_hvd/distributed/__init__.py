"""AdaSum on torch.distributed alone: no Horovod, no compiler, any backend with its collectives.

`adasum_all_reduce` reduces tensors. `AdasumState` and `adasum_hook` make DDP reduce its buckets so,
and `adasum_replicate` the gradients of a sharded model. `LocalSGD` reduces changes of weights after
several local steps. The steps begin in `reduction`; `adasum_hvd.reference` has the definition.
"""

import torch

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
    raise ImportError(
        f"adasum_hvd.distributed: expected torch 2.4 or newer, but got {torch.__version__}; "
        "pip install 'torch>=2.4'"
    )

from adasum_hvd.advice.learning_rate import LearningRate, adasum_lr
from adasum_hvd.advice.run import Advice, advise
from adasum_hvd.base.marks import mark_worker_local
from adasum_hvd.base.replicas import ReplicaMismatch
from adasum_hvd.distributed.adascale import AdaScaleLR
from adasum_hvd.distributed.all_reduce import AdasumWork, adasum_all_reduce
from adasum_hvd.distributed.clipping import clip_grad_norm_
from adasum_hvd.distributed.ddp import (
    AdasumState,
    Compression,
    adasum_hook,
    register_adasum_hook,
)
from adasum_hvd.distributed.delta import reduce_changes
from adasum_hvd.distributed.local_sgd import LocalSGD
from adasum_hvd.distributed.monitor import AdasumMonitor
from adasum_hvd.distributed.replicas import banner, check_replicas
from adasum_hvd.distributed.replicate import ReplicateHandle, adasum_replicate

__all__ = [
    "AdaScaleLR",
    "AdasumMonitor",
    "AdasumState",
    "AdasumWork",
    "Advice",
    "Compression",
    "LearningRate",
    "LocalSGD",
    "ReplicaMismatch",
    "ReplicateHandle",
    "adasum_all_reduce",
    "adasum_hook",
    "adasum_lr",
    "adasum_replicate",
    "advise",
    "banner",
    "check_replicas",
    "clip_grad_norm_",
    "mark_worker_local",
    "reduce_changes",
    "register_adasum_hook",
]
