"""MindSpore's checkpoints: see :mod:`adasum_hvd.mindspore.checkpoint`.

`load` and `save` need torch; `read` and `write` need NumPy only.
"""

from typing import TYPE_CHECKING, Any

from adasum_hvd.mindspore.checkpoint import Entry, read, write

if TYPE_CHECKING:
    from adasum_hvd.mindspore.torch_checkpoint import load, save

__all__ = ["Entry", "load", "read", "save", "write"]


def __getattr__(name: str) -> Any:
    if name in ("load", "save"):
        from adasum_hvd.mindspore import torch_checkpoint

        return getattr(torch_checkpoint, name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; use one of {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return [*globals(), "load", "save"]
