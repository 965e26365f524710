"""AdaSum on torch.distributed alone: no Horovod, no compiler; any backend with torch's collectives.

`adasum_all_reduce` reduces tensors. The arithmetic is in `reduction`, which names the steps, and
the definition in `adasum_hvd.reference`.
"""

from adasum_hvd.distributed.all_reduce import AdasumWork, adasum_all_reduce

__all__ = ["AdasumWork", "adasum_all_reduce"]
