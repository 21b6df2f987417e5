"""Hooks for methods of objects that have none of their own.

The class of the object is replaced by a subclass in which the method reports the call. `isinstance`,
attributes and `state_dict` stay as they were (a function set on the object itself would become part of a
scheduler's state), and the object pickles and copies as an instance of its original class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

# Descriptor of the true class: some wrappers define a property ``__class__`` to hide themselves.
_CLASS: Final[Any] = object.__dict__["__class__"]


def override(value: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace a method of this one object.

    Args:
        value: The object.
        name: Name of the method.
        make: Gets the method as a function of the object and returns its replacement, a function of the
            object too.

    Returns:
        Whether that was possible; not for classes written in C, or with a memory layout of their own.
    """
    base = type(value)
    method = getattr(base, name, None)
    if method is None:
        return False

    def reduce_ex(self: Any, protocol: Any) -> Any:
        derived = type(self)
        # Pickled as an instance of the original class: the derived one cannot be imported anywhere.
        _CLASS.__set__(self, base)
        try:
            reduced = self.__reduce_ex__(protocol)
        finally:
            _CLASS.__set__(self, derived)
        if isinstance(reduced, tuple) and getattr(reduced[0], "__name__", "") == "__newobj__":
            # pickle insists that __newobj__ makes an instance of the object's current class.
            return (_new, *reduced[1:])
        return reduced

    body = {
        name: make(method),
        "__reduce_ex__": reduce_ex,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    # `__module__` and names of the original, so that what prints or looks up the class finds the original.
    try:
        derived = type(base.__name__, (base,), body)
        derived.__qualname__ = base.__qualname__
        _CLASS.__set__(value, derived)
    except TypeError:
        return False
    return True


def _new(cls: Any, *args: Any) -> Any:
    """Create an instance as copyreg.__newobj__ does."""
    return cls.__new__(cls, *args)


def tell_after(value: object, name: str, told: Callable[[], None]) -> bool:
    """Call ``told`` after each call of ``value.name(…)`` that returns; return whether that is possible."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            told()
            return result

        wrapped.__doc__ = method.__doc__
        return wrapped

    return override(value, name, make)
