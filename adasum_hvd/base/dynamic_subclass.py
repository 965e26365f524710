"""Dynamic subclasses: an optimizer or a tape becomes an instance of a subclass of its own class.

The wrapped object keeps its attributes and passes `isinstance` checks for its original class.
"""

from __future__ import annotations

from typing import Any

_classes: dict[tuple[type, type], type] = {}


def as_dynamic_subclass(
    instance: Any, mixin: type, name: str, **attributes: Any
) -> Any:
    """Return `instance`'s attributes in an object whose class derives from `mixin` and its own.

    The mixin comes first, and no `__init__` runs. The two objects share what their attributes
    refer to, so use the returned one only. Each pair of mixin and class gets one class of this
    name, with these attributes, and `_base`, the object's original class.

    Example:
        >>> class Plain:
        ...     def answer(self): return 21
        >>> class Twice:
        ...     def answer(self): return 2 * super().answer()
        >>> twice = as_dynamic_subclass(Plain(), Twice, "TwicePlain")
        >>> twice.answer(), isinstance(twice, Plain), type(twice).__name__
        (42, True, 'TwicePlain')
    """
    base = type(instance)
    if (mixin, base) not in _classes:
        about = {"__module__": mixin.__module__, "__doc__": base.__doc__, "_base": base}
        _classes[mixin, base] = type(name, (mixin, base), {**about, **attributes})
    return as_instance_of(instance, _classes[mixin, base])


def as_instance_of(instance: Any, cls: type) -> Any:
    """Return `instance`'s attributes in a new object of exactly this class."""
    twin: Any = object.__new__(cls)
    twin.__dict__.update(instance.__dict__)
    return twin
