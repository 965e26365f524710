"""Public names of a module that replaces one of Horovod's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def with_signature_of(theirs: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator that lets a function show the signature of one of Horovod's.

    Unlike `functools.wraps`, which says that the one is the other.
    """

    def decorate(function: Function) -> Function:
        function.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]
        return function

    return decorate


def public(namespace: dict[str, Any]) -> list[str]:
    """Return a module's public names; modules that are not Horovod's or ours leave it.

    Horovod's modules import `os`, `warnings`, the framework, ... under their own names, and a
    star brings them along.

    Args:
        namespace: the module's `globals()`, after its last import.

    Returns:
        What its `__all__` lacks: of modules only `elastic` and `callbacks`, which are part of
        the interface.
    """
    for name, value in list(namespace.items()):
        if name.startswith("_") or not isinstance(value, ModuleType):
            continue
        if value.__name__.partition(".")[0] not in ("horovod", "adasum_hvd"):
            del namespace[name]
    return sorted(
        name
        for name, value in namespace.items()
        if not name.startswith("_")
        and name not in namespace["__all__"]
        and (not isinstance(value, ModuleType) or name in ("elastic", "callbacks"))
    )
