"""Being told of calls on objects that have no hooks for it.

The object's class is replaced by a subclass of it, in which the method tells; `isinstance`, its attributes and its `state_dict` stay as
they were (a function set on the object itself would be part of a scheduler's state), and it pickles and copies as what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_CLASS: Final[Any] = object.__dict__["__class__"]
"""The true one: some objects have a property of that name, to be taken for what they wrap."""


def override(value: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replaces the method ``name`` of this one object by what ``make`` makes of it. Whether that could be done.

    ``make`` gets the method as a function of the object; what it returns is one too.
    """
    base = type(value)
    method = getattr(base, name, None)
    if method is None:
        return False

    def reduce_ex(self: Any, protocol: Any) -> Any:
        derived = type(self)
        _CLASS.__set__(self, base)
        try:
            reduced = self.__reduce_ex__(protocol)
        finally:
            _CLASS.__set__(self, derived)
        if isinstance(reduced, tuple) and getattr(reduced[0], "__name__", "") == "__newobj__":
            return (_new, *reduced[1:])  # pickle insists that __newobj__ makes one of the object's own class
        return reduced

    body = {
        name: make(method),
        "__reduce_ex__": reduce_ex,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    try:
        derived = type(base.__name__, (base,), body)
        derived.__qualname__ = base.__qualname__
        _CLASS.__set__(value, derived)
    except TypeError:
        return False  # written in C, or of a layout of its own
    return True


def _new(cls: Any, *args: Any) -> Any:
    """As copyreg.__newobj__."""
    return cls.__new__(cls, *args)


def tell_after(value: object, name: str, told: Callable[[], None]) -> bool:
    """``told`` is called after each call of ``value.name(…)`` that returns."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            told()
            return result

        wrapped.__doc__ = method.__doc__
        return wrapped

    return override(value, name, make)
