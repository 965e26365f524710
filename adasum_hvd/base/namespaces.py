"""Public names of a module that replaces one of Horovod's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def with_signature_of(
    horovod_function: Callable[..., Any],
) -> Callable[[Function], Function]:
    """Return a decorator that gives a function the signature of one of Horovod's.

    Unlike `functools.wraps`, it sets no `__wrapped__` and keeps name and docstring.
    """
    signature = inspect.signature(horovod_function)

    def decorate(function: Function) -> Function:
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def public(namespace: dict[str, Any]) -> list[str]:
    """Return the public names that a module's `__all__` lacks, and delete foreign modules.

    `from horovod.torch import *` also imports `os`, `warnings`, the framework and so on; they
    are deleted from the namespace, which is `globals()`. Of modules only `elastic` and
    `callbacks` are public.
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
        and name not in namespace.get("__all__", ())
        and (not isinstance(value, ModuleType) or name in ("elastic", "callbacks"))
    )
