"""Attributes of an elastic state as bytes, which a commit keeps and other ranks load."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle


def is_stateful(value: Any) -> bool:
    """Return whether an object is kept, and gets the committed `state_dict()`."""
    names = "state_dict", "load_state_dict"
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def pack(
    caller: str, contents: Mapping[str, Any], is_trained: Callable[[Any], bool]
) -> bytes:
    """Return a state's attributes as bytes; `caller` is the state's name, for messages.

    Raises TypeError for an attribute that cannot be pickled, or that refers to an object of a model
    or optimizer (`is_trained`): a rank with a copy of it would train, schedule or average the copy.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, is_trained)
    for name, content in contents.items():
        try:
            pickler.dump((name, content))
        except Exception as error:  # a class's own __reduce__ may raise any
            raise TypeError(
                f"{caller}: expected attributes that pickle, but got {name} "
                f"({type(content).__name__}): {error}; give the state an object with "
                "state_dict() and load_state_dict() by a name of its own, or numbers"
            ) from error
    return file.getvalue()


def unpack(packed: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of :func:`pack` by name."""
    file = io.BytesIO(packed)
    unpickler = pickle.Unpickler(file)
    while file.tell() < len(packed):
        yield unpickler.load()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, is_trained: Callable[[Any], bool]):
        super().__init__(file)
        self._is_trained = is_trained

    def persistent_id(self, obj: Any) -> None:
        """Raise TypeError for an object that must not be copied."""
        if self._is_trained(obj):
            raise TypeError(f"it refers to a {type(obj).__name__} of the training")

    def reducer_override(self, obj: Any) -> Any:
        """Send functions and classes of the program by name, because all ranks run it.

        cloudpickle copies those of the main module, with the globals that they use.
        """
        return NotImplemented if _is_global(obj) else super().reducer_override(obj)


def _is_global(obj: Any) -> bool:
    if not isinstance(obj, type | types.FunctionType):
        return False
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj
