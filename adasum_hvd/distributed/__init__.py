"""AdaSum on torch.distributed alone: no Horovod, no compiler; any backend with torch's collectives.

`adasum_all_reduce` reduces tensors, `adasum_replicate` the gradients of a sharded model. The
arithmetic is in `reduction`, which names the steps, and the definition in `adasum_hvd.reference`.
"""

from adasum_hvd.distributed.all_reduce import AdasumWork, adasum_all_reduce
from adasum_hvd.distributed.replicate import Replicas, adasum_replicate

__all__ = ["AdasumWork", "Replicas", "adasum_all_reduce", "adasum_replicate"]
