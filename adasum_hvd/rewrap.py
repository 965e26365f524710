"""An object's attributes in an object of another class: how optimizers and tapes are wrapped.

A wrapped object stays one of its own class, so that whoever asks with `isinstance` or reaches
for an attribute finds what was there before. No framework in here.
"""

from __future__ import annotations

from typing import Any

_classes: dict[tuple[type, type], type] = {}


def rewrapped(instance: Any, mixin: type, name: str, **attributes: Any) -> Any:
    """Return `instance`'s attributes in an object of a class of `mixin` and its own class.

    The mixin comes first, and no `__init__` runs. The two objects share what their attributes
    refer to, so use the returned one only.

    Args:
        instance: any object that keeps its attributes in `__dict__`.
        mixin: what overrides methods of the object's class.
        name: of the new class; one class is made for each mixin and class.
        **attributes: of the new class, beside `_base`, the object's own class.

    Example:
        >>> class Plain:
        ...     def answer(self): return self.number
        >>> class Twice:
        ...     def answer(self): return 2 * super().answer()
        >>> plain = Plain()
        >>> plain.number = 21
        >>> twice = rewrapped(plain, Twice, "TwicePlain")
        >>> twice.answer(), isinstance(twice, Plain), type(twice).__name__
        (42, True, 'TwicePlain')
        >>> as_class(twice, twice._base).answer()
        21
    """
    base = type(instance)
    if (mixin, base) not in _classes:
        about = {"__module__": mixin.__module__, "__doc__": base.__doc__, "_base": base}
        _classes[mixin, base] = type(name, (mixin, base), {**about, **attributes})
    return as_class(instance, _classes[mixin, base])


def as_class(instance: Any, cls: type) -> Any:
    """Return `instance`'s attributes in a new object of exactly this class."""
    twin: Any = object.__new__(cls)
    twin.__dict__.update(instance.__dict__)
    return twin
