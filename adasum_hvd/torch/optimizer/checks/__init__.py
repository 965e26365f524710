"""Checks that find replicas that would diverge silently."""

from adasum_hvd.torch.optimizer.checks.consistency import ConsistencyCheck, join
from adasum_hvd.torch.optimizer.checks.missed_step import MissedStepCheck

__all__ = ["ConsistencyCheck", "MissedStepCheck", "join"]
