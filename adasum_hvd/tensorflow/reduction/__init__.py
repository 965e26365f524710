"""Reduction of lists of gradients or weight changes, under names that all ranks share.

Ranks and steps may have tensors for different variables, as if a batch does not use a branch of
the model. A rank without a tensor contributes zeros, and learns whether any rank has one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from adasum_hvd.base import ops
from adasum_hvd.base.agreement import is_elastic
from adasum_hvd.base.options import Options, ProcessSet
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.reduction import lists, named
from adasum_hvd.tensorflow.reduction.buckets import reduce_list
from adasum_hvd.tensorflow.unfolded import zero

_MANY = 1 << 29  # larger than any number of a list


def is_alone(process_set: ProcessSet) -> bool:
    """Return whether this rank reduces with no other; False in an elastic job."""
    if not process_set.included():
        return True
    return process_set.size() == 1 and not is_elastic()


def must_reduce(options: Options) -> bool:
    """Return whether steps reduce: with other ranks, or alone to bound the change."""
    process_set = options.process_set
    return not is_alone(process_set) or (
        process_set.included() and options.clip_delta_norm is not None
    )


class Reduction:
    """Reduces lists of tensors that belong to variables.

    Args:
        what: the caller's name, for messages and for the tensors' names.
        options: the caller's.
        many_lists: lists may differ between steps, and are an error if they differ between ranks.
            Otherwise all variables of an optimizer are the list.
        optimizer: returns the facts of the optimizer that takes the step, which must be equal.
    """

    def __init__(
        self,
        what: str,
        options: Options,
        many_lists: bool = False,
        optimizer: Callable[[], dict[str, object]] = dict,
    ):
        self._what, self._options, self._optimizer = what, options, optimizer
        # In an elastic job only the step itself can show that a list differs.
        self._many = many_lists or is_elastic()
        self._any_local = False  # whether some rank has worker-local variables
        self._known: dict[Hashable, lists.Agreed] = {}
        self._places: dict[int, int] = {}  # among all variables, by id
        self._first: int | None = None  # the number of the first list
        # Of the latest list: a list of one variable's name, by Horovod's name for its tensor.
        self.entries: dict[str, list[str]] = {}

    def number(self, variables: Sequence[Any]) -> None:
        """Number all variables: ranks may use different ones, with other names or equal shapes."""
        self._places = {id(variable): k for k, variable in enumerate(variables)}

    # ---- reducing ----

    def __call__(
        self,
        tensors: Sequence[Any],
        variables: Sequence[Any],
        places: Sequence[int] | None = None,
        refuses: bool = False,
        present: Sequence[bool] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Return `tensors` reduced, one per variable, and whether any rank has each of them.

        A tensor is None if this rank has none, and the result is zeros if no rank has one. Whether
        a rank has one is True or, if this rank has none, a boolean scalar; with `refuses` it raises
        if another rank has one. `places` as :meth:`agree`. Collective.
        """
        agreed = self.agree(tensors, variables, places=places)
        present = present or [tensor is not None for tensor in tensors]
        label = f"{self._what}.{agreed.number}"
        used, checks = self._exchange_flags(label, agreed.number, present, refuses)
        # Ranks may disagree about any list but the first, so its buckets wait for the checks.
        with tf.control_dependencies([] if agreed.number == self._first else checks):
            # A cast to the same dtype adds no operation that would wait for the checks.
            full = [
                tf.identity(lists.in_kind(tensor, variable, kind))
                for tensor, variable, kind in zip(
                    tensors, variables, agreed.kinds, strict=True
                )
            ]
        self.entries = {}
        results = reduce_list(label, full, variables, self._options, self.entries)
        with tf.control_dependencies(checks):
            return [tf.identity(result) for result in results], used

    def gradients(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        places: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return `gradients` reduced, and None for those that no rank has. Collective.

        A graph is traced before the ranks know that, so there all ranks must have the same.
        """
        eager = tf.executing_eagerly()
        results, used = self(gradients, variables, places, refuses=not eager)
        mine = [gradient is not None for gradient in gradients]
        pairs = zip(results, used if eager else mine, strict=True)
        return [result if bool(flag) else None for result, flag in pairs]

    def _exchange_flags(
        self, label: str, number: int, present: Sequence[bool], refuses: bool
    ) -> tuple[list[Any], list[Any]]:
        """Return whether any rank has a tensor for each variable, and the checks of the lists."""
        mine, count = [int(here) for here in present], len(present)
        if self._many:
            mine += [int(refuses and not here) for here in present]
            # Their maxima add up to 2 * _MANY only if all numbers are equal. A rank that has
            # joined contributes zeros.
            mine += [_MANY + number, _MANY - number]
        name = f"{self._what}.lists" if self._many else f"{label}.flags"
        flags = self._largest(mine, name)
        used = [True if here else flags[k] > 0 for k, here in enumerate(present)]
        if not self._many:
            return used, [flags]
        refused = flags[:count] * flags[count : 2 * count]
        checks = [
            (tf.equal(flags[-2] + flags[-1], 2 * _MANY), self._other_lists()),
            (
                tf.reduce_all(tf.equal(refused, 0)),
                f"{self._what}: expected gradients of the same variables on all ranks in a "
                "tf.function or TF1 graph, but got None on some ranks only; pass "
                "unconnected_gradients=tf.UnconnectedGradients.ZERO to gradient(), or use the "
                "branch with a weight of zero",
            ),
        ]
        return used, [flags, *(_require(*check) for check in checks)]

    def _other_lists(self) -> str:
        return (
            f"{self._what}: expected gradients of the same list of variables on all ranks, but "
            "got different lists in the same step; pass the same variables on every rank, also "
            "those without a gradient"
        )

    def _largest(self, values: Sequence[int], name: str) -> Any:
        """Return the largest of all ranks' values, elementwise."""
        with tf.device("CPU:0"):
            mine = tf.constant(values, tf.int32, [len(values)]) + zero(tf.int32)
            try:
                return self._reduce_max(mine, name)
            except tf.errors.OpError as error:
                if "Mismatched" not in str(error):
                    raise
                raise ValueError(self._other_lists()) from error

    def _reduce_max(self, tensor: Any, name: str) -> Any:
        (result,) = named.reduce_named(
            [tensor], name, ops.Max, self._options.process_set
        )
        return result

    # ---- agreeing ----

    def agree(
        self,
        tensors: Sequence[Any],
        variables: Sequence[Any],
        has_local: bool = False,
        places: Sequence[int] | None = None,
        note: Callable[[], str] = str,
    ) -> lists.Agreed:
        """Compare the list, the optimizer, the options and the op's settings over the ranks.

        Of the tensors only dtypes count. `has_local`: this rank has worker-local variables; `note`
        returns a text for all ranks; `places` are the variables' positions among all, by default
        from `number`. Collective, also with an empty list, the first time that a list is seen; not
        in an elastic job, because ranks see their first lists at different times.
        """
        tf_ops.refuse_xla(self._what)
        if tf.distribute.has_strategy():
            raise NotImplementedError(
                f"{self._what}: expected one model per rank, but got a tf.distribute strategy; "
                "let Horovod start one process per device instead"
            )
        if places is None:
            places = [self._places.get(id(variable), -1) for variable in variables]
        is_delta = self._options.is_delta
        mine = [
            lists.describe(tensor, variable, place, is_delta)
            for tensor, variable, place in zip(tensors, variables, places, strict=True)
        ]
        key = tuple(entry.key for entry in mine)
        if key not in self._known:
            has_local = has_local or self._any_local
            agreed = self._compare(mine, has_local, note())
            if agreed.kinds and not agreed.any_tensor:
                return agreed  # the next step may have gradients
            self._known[key] = agreed
        return self._known[key]

    def compare_all(self, variables: Sequence[Any], has_local: bool) -> None:
        """Compare all variables that will be reduced, as :meth:`agree`. Collective; blocks."""
        is_delta = self._options.is_delta
        mine = [lists.describe(None, v, k, is_delta) for k, v in enumerate(variables)]
        arguments = self._what, self._options, self._optimizer(), mine, has_local
        self._any_local = lists.compare(*arguments).any_local

    def _compare(
        self, mine: list[lists.Entry], has_local: bool, note: str
    ) -> lists.Agreed:
        together = not is_elastic() and self._options.process_set.size() > 1
        with tf.init_scope():
            if together and self._many and tf.executing_eagerly():
                # Raises if another rank reduces a list that it knows.
                self._largest([0], f"{self._what}.lists")
        arguments = self._what, self._options, self._optimizer(), mine, has_local
        agreed = lists.compare(*arguments, together, note)
        if self._first is None and not is_elastic():
            self._first = agreed.number
        return agreed

    def all_of(self, flag: Any) -> Any:
        """Return whether the boolean scalar `flag` is true on all ranks. Collective."""
        # A rank that has joined contributes zero, so the ranks reduce the negation.
        missing = 1 - tf.cast(flag, tf.int32)
        number = self.agree([missing], [missing]).number
        return tf.equal(self._reduce_max(missing, f"{self._what}.{number}"), 0)


def _require(condition: Any, message: str) -> Any:
    """Raise ValueError unless `condition`; in a graph the error comes when the graph runs."""
    if not tf.executing_eagerly():
        return tf.debugging.Assert(condition, [message])
    if not bool(condition):
        raise ValueError(message)
    return condition
