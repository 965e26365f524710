"""AdaSum (adaptive summation, arXiv 2006.02924) for torch.distributed and Horovod.

`adasum_hvd.distributed` needs torch. `adasum_hvd.torch` and `adasum_hvd.tensorflow` stand in for
`horovod.torch` and `horovod.tensorflow`. This module itself imports no framework.
"""

__version__ = "0.3.0"
