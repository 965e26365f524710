"""`horovod.tensorflow.keras` that reduces: `import adasum_hvd.tensorflow.keras as hvd`."""

from adasum_hvd.tensorflow import *
from adasum_hvd.tensorflow.compile import compile
from adasum_hvd.tensorflow.keras import callbacks
