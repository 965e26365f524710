"""Search of the call stack, where a library passes no other sign of who calls."""

from __future__ import annotations

import sys
import traceback
from types import FrameType

_CHECKPOINT = "torch.distributed.checkpoint.state_dict"


def running(function: str, module: str) -> list[FrameType]:
    """Return the frames of a function of a module on this thread, the innermost one first."""
    return [
        frame
        for frame, _ in traceback.walk_stack(sys._getframe().f_back)
        if frame.f_code.co_name == function
        and frame.f_globals.get("__name__") == module
    ]


def is_inside(function: str, module: str) -> bool:
    """Return whether a function of a module is running on this thread."""
    return bool(running(function, module))


def is_making_state() -> bool:
    """Return whether the optimizer step that runs only makes state: it is not training.

    The functions of `torch.distributed.checkpoint.state_dict`, which accelerate and Lightning
    call, take a step with gradients and rates of zero if an optimizer has neither state nor
    gradients. Horovod's own `broadcast_optimizer_state` takes one with zero gradients.
    """
    return is_inside("_init_optim_state", _CHECKPOINT) or is_inside(
        "broadcast_optimizer_state", "horovod.torch.functions"
    )


def is_saving_state() -> bool:
    """Return whether `torch.distributed.checkpoint` reads a state: it drops keys of our own."""
    return is_inside("_get_optim_state_dict", _CHECKPOINT)
