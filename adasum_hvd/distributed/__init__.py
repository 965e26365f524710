"""AdaSum on torch.distributed alone: no Horovod, no compiler; any backend with torch's collectives.

`adasum_all_reduce` reduces tensors; `AdasumState` and `adasum_hook` make DDP reduce its buckets so.
The arithmetic is in `reduction`, which names the steps, and the definition in
`adasum_hvd.reference`.
"""

from adasum_hvd.distributed.all_reduce import AdasumWork, adasum_all_reduce
from adasum_hvd.distributed.ddp import AdasumState, Compression, adasum_hook

__all__ = [
    "AdasumState",
    "AdasumWork",
    "Compression",
    "adasum_all_reduce",
    "adasum_hook",
]
