"""The base of both `DistributedGradReducer`s: plain sums or means of gradients, in float32.

References:
    MindSpore 1.7, `mindspore.nn.DistributedGradReducer`; docs/mindspore.md.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from adasum_hvd.base.agreement import refuse_elastic, registered
from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.base.options import ProcessSet, check_count
from adasum_hvd.parallel.context import check_bool

# Names must be equal on all ranks of a group, even if other ranks construct more reducers.
_reducers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class GradReducer(ABC):
    """Sums gradients over the ranks of a group in float32, and multiplies by 1 / degree.

    Args:
        parameters: the parameters that the gradients belong to, in the gradients' order. One
            with a true attribute `layerwise_parallel` or `is_in_shard`, or marked with
            `mark_worker_local`, keeps its own gradient; parameters with the same attribute
            `comm_fusion` are reduced together.
        mean: multiply the sums by 1 / degree. Unset, it does so with a warning, because
            MindSpore sums by default (its context's `gradients_mean`).
        degree: the divisor; by default the number of ranks in `group` (not in the job).
        fusion_type: the fusion number of parameters without a `comm_fusion`.
        group: a Horovod process set; by default all ranks.
        split_indices: with `fusion_type=1`, a new fusion group begins after each index.

    Raises:
        TypeError: `parameters` are pairs, or `mean` is not a bool.
        ValueError: `degree` is not an int or not larger than 0.
        NotImplementedError: the job is elastic, so that the number of ranks can change.
    """

    _all_ranks: ProcessSet  # the framework's global process set

    def __init__(
        self,
        parameters: Iterable[Any],
        mean: bool | None = None,
        degree: int | None = None,
        fusion_type: int = 1,
        group: ProcessSet | None = None,
        split_indices: Sequence[int] | None = None,
    ):
        refuse_elastic("DistributedGradReducer")
        self.parameters = tuple(parameters)
        if any(isinstance(parameter, tuple) for parameter in self.parameters):
            raise TypeError(
                "DistributedGradReducer: expected parameters, but got (name, parameter) pairs; "
                "pass the parameters alone, in the order of the gradients"
            )
        if mean is None:
            mean = True
            warnings.warn(
                "DistributedGradReducer: expected mean, but got none: gradients are averaged "
                "here, and summed by MindSpore's default; pass mean=True or False",
                stacklevel=2,
            )
        check_bool("DistributedGradReducer: mean", mean)
        self._group = registered(self._all_ranks if group is None else group)
        degree = self._group.size() if degree is None else degree
        check_count("DistributedGradReducer: degree", degree)
        self._factor = 1.0 / degree if mean else 1.0
        self._fusion = fusion_groups(self.parameters, fusion_type, split_indices)
        count = _reducers.setdefault(self._group, itertools.count())
        self._name = f"grad_reducer.{self._group.process_set_id}.{next(count)}"

    def __call__(self, gradients: Any) -> Any:
        """Return the reduced gradients: a tensor for a tensor, a tuple for a sequence.

        They are one per parameter (else ValueError), of any float dtype, dense or sparse. Of sparse
        ones all ranks' entries are returned, not added up. None stays None, and must be None on all
        ranks. Collective: every rank of the group; blocks.
        """
        if not isinstance(gradients, list | tuple):
            return self((gradients,))[0]
        if len(gradients) != len(self.parameters):
            raise ValueError(
                f"DistributedGradReducer: expected {len(self.parameters)} gradients, one per "
                f"parameter, but got {len(gradients)}"
            )
        results = list(gradients)
        dense = defaultdict[int, list[int]](list)  # by fusion number
        for index, gradient in enumerate(gradients):
            if gradient is None or self._keeps_its_own(self.parameters[index]):
                continue
            if self._is_sparse(gradient):
                name = f"{self._name}.sparse.{index}"
                results[index] = self._reduce_sparse(name, gradient)
            else:
                dense[self._fusion[index]].append(index)
        for fusion, indices in dense.items():
            members = [gradients[index] for index in indices]
            reduced = self._reduce(f"{self._name}.{fusion}", members)
            for index, result in zip(indices, reduced, strict=True):
                results[index] = result
        return tuple(results)

    def _keeps_its_own(self, parameter: Any) -> bool:
        shards = ("layerwise_parallel", "is_in_shard")
        return is_marked_local(parameter) or any(
            getattr(parameter, name, False) for name in shards
        )

    @abstractmethod
    def _is_sparse(self, gradient: Any) -> bool: ...

    @abstractmethod
    def _reduce_sparse(self, name: str, gradient: Any) -> Any: ...

    @abstractmethod
    def _reduce(self, name: str, gradients: list[Any]) -> list[Any]: ...


def fusion_groups(
    parameters: Sequence[Any], fusion_type: int, split_indices: Sequence[int] | None
) -> list[int]:
    """Return each parameter's fusion number; see :class:`GradReducer`."""
    own = [getattr(parameter, "comm_fusion", fusion_type) for parameter in parameters]
    if len(set(own)) > 1:
        return own
    if not split_indices or fusion_type != 1:
        return [fusion_type] * len(parameters)
    if max(split_indices) >= len(parameters):
        warnings.warn(
            f"split_indices: expected indices below {len(parameters)}, but got "
            f"{list(split_indices)}; larger ones are ignored",
            stacklevel=3,
        )
    splits = sorted(split_indices)
    return [2**10 + sum(split < index for split in splits) for index in range(len(own))]
