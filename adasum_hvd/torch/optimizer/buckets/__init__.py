"""Buckets: many parameters as one Horovod tensor, of gradients, weight changes or sparse rows."""

from adasum_hvd.torch.optimizer.buckets.bucket import Bucket, NamedParameter
from adasum_hvd.torch.optimizer.buckets.sparse import SparseBucket
from adasum_hvd.torch.optimizer.buckets.weight_change import ChangeBucket

__all__ = [
    "Bucket",
    "ChangeBucket",
    "NamedParameter",
    "SparseBucket",
]
