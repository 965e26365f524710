"""Buckets: many parameters as one Horovod tensor, of gradients, weight changes or sparse rows."""

from adasum_hvd.torch.optimizer.buckets.bucket import Bucket as Bucket
from adasum_hvd.torch.optimizer.buckets.bucket import NamedParameter as NamedParameter
from adasum_hvd.torch.optimizer.buckets.sparse import SparseBucket as SparseBucket
from adasum_hvd.torch.optimizer.buckets.weight_change import (
    ChangeBucket as ChangeBucket,
)
