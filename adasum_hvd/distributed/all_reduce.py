"""`adasum_all_reduce`: AdaSum of tensors over a process group of torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from adasum_hvd.distributed.checks import Call, agree, call_of, listed, overlap
from adasum_hvd.distributed.communicator import Communicator, check_groups, hosts_of
from adasum_hvd.distributed.lanes import Future, Lane, lane_on
from adasum_hvd.distributed.reduction import reduce_tensors
from adasum_hvd.distributed.rules import Coefficients, Rule, rule_of

_lanes: weakref.WeakKeyDictionary[Any, dict[torch.device, Lane]]
_lanes = weakref.WeakKeyDictionary()  # by process group


class AdasumWork:
    """A reduction that has been started; what `adasum_all_reduce(async_op=True)` returns."""

    def __init__(self, future: Future):
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensors hold the result, or on a device make the current stream wait.

        Args:
            timeout: ignored, because the process group's timeout applies; torch's `Work` has it.

        Raises:
            ValueError, RuntimeError: as `adasum_all_reduce`.
        """
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._future.done()

    def get_future(self) -> Future:
        """Return a future of the list of tensors."""
        return self._future


@torch._disable_dynamo
def adasum_all_reduce(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    group: Any = None,
    *,
    rule: str | Coefficients = "adasum",
    group_op: str | None = None,
    group_size: int | None = None,
    async_op: bool = False,
) -> AdasumWork | None:
    r"""Replace each tensor by its AdaSum over the ranks, in place.

    Of two ranks' tensors that is `(1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b`; more ranks are
    merged along the tree of `adasum_hvd.reference`. All ranks end with the same bits.

    Args:
        tensors: one tensor or several, float16, bfloat16, float32 or float64, of any shape; each
            has coefficients of its own, and shares no element with another one. The same shapes
            and dtypes in the same order on all ranks.
        group: the process group, or its mesh of one dimension; by default the default one.
        rule: "adasum", "mean", "mean_direction", "grafted" or "rda" (docs/distributed.md has the
            formulas), or a function from Gram matrices, float64 [tensors, N, N], to
            coefficients, float64 [tensors, N]: the result is `\sum c_i x_i`. It is called on all
            ranks with the same matrices, once for each dtype; float64 tensors are scaled by a
            power of two first.
        group_op: "average" (or "sum"): the ranks of a group are averaged first, and AdaSum joins
            groups. By default `ADASUM_HVD_GROUP_OP`, else "adasum", which is AdaSum everywhere.
        group_size: consecutive ranks in a group; by default `ADASUM_HVD_GROUP_SIZE`, else 0, which
            means that a host is a group.
        async_op: return at once.

    Returns:
        With `async_op` a handle; its `wait` raises the errors that the call would raise.

    Raises:
        ValueError: on all ranks, before any tensor is sent: tensors, rule or groups are not the
            same on all ranks, or one of them is not supported. Or this rank is not in the group.
        RuntimeError: a rank did not respond within the group's timeout.

    Collective: all ranks of the group, in the same order; blocks unless `async_op`. Tensors must
    not be read or changed before an asynchronous reduction ends.

    References:
        arXiv 2006.02924, equation 7; docs/distributed.md.
    """
    communicator = Communicator(group)
    call, several, checked = checked_call(
        tensors, communicator, rule, group_op, group_size
    )
    if not call.problem and overlap(several):
        problem = ValueError(
            "expected tensors that share no elements, but got the same memory in two of them; "
            "pass each tensor once"
        )
        call = Call(problem=problem)

    def reduce(communicator: Communicator) -> list[torch.Tensor]:
        agree("adasum_all_reduce", call, communicator)
        # Else only the ranks whose slices have elements of an inference tensor raise.
        inference = any(map(torch.is_inference, several))
        with torch.inference_mode(inference), torch.no_grad():
            reduce_list([tensor.detach() for tensor in several], communicator, checked)
        return several

    if not async_op:
        reduce(communicator)
        return None
    found = (one.device for one in several if isinstance(one, torch.Tensor))
    device = next(found, torch.device("cpu"))
    lanes = _lanes.setdefault(communicator.group, {})
    if device not in lanes:
        lanes[device] = lane_on(device, Communicator(communicator.group, apart=True))
    try:
        future = lanes[device].submit(reduce, [] if call.problem else several)
    except Exception as error:  # a stream runs it at once; `wait` raises its errors
        future = torch.futures.Future()
        future.set_exception(error)
    return AdasumWork(future)


def checked_call(
    tensors: Any,
    communicator: Communicator,
    rule: str | Coefficients,
    group_op: str | None,
    group_size: int | None,
) -> tuple[Call, list[torch.Tensor], Rule]:
    """Return a call, with the problem if there is one, its tensors and its rule.

    Collective as `hosts_of`.
    """
    hosts_of(communicator)
    try:
        several = listed(tensors)
        checked = rule_of(rule, group_op, group_size, has_passes=False)
        check_groups(communicator, checked)
    except ValueError as error:  # on the other ranks, too
        return Call(problem=error), [], Rule("adasum")
    return call_of(several, checked.described), several, checked


def reduce_list(
    tensors: Sequence[torch.Tensor], communicator: Communicator, rule: Rule
) -> None:
    """Reduce tensors that agree on all ranks, in place; those of a dtype together."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        reduce_tensors(of_dtype, communicator, rule)
