"""Values of the standard library and of the program's own classes, as plain values and back, without pickle.

Guarantees: a value comes back with the same type and equal. Nothing is imported or called by a name that is
stored: a class of the program is used only if the program has registered it under that name. Only values of
exactly a known class are converted, since of a subclass what it adds would be lost.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import os
import pathlib
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

from ciuic.training.json_documents import MALFORMED

Class = TypeVar("Class", bound=type)


class ValueType(NamedTuple):
    """Form in which the values of one class are stored."""

    cls: type
    name: str
    """Name of the class in snapshots."""
    to_plain: Callable[[Any], Any]
    """Returns what is stored: anything that a state may hold."""
    from_plain: Callable[[Any], Any]
    """Returns the value, given what `to_plain` returned."""


class UnknownType(Exception):
    """Error: a snapshot holds a value of a class that the program has not registered.

    No ValueError: the snapshot is whole, and an older one must not be loaded in its place.
    """


def register_type(
    cls: Class,
    name: str = "",
    to_plain: Callable[[Any], Any] | None = None,
    from_plain: Callable[[Any], Any] | None = None,
) -> Class:
    """Let values of a class be part of saved states. Call it before saving and before loading.

        register_type(Color)                                             # an Enum, a named tuple or a dataclass
        register_type(Version, "version", lambda v: str(v), Version)     # any other class

    Args:
        cls: The class; of its subclasses each is registered by itself.
        name: Name in snapshots. By default module and name of the class, which must then stay as they are.
        to_plain: Returns a value's content: anything that a state may hold. Not needed for an Enum, whose
            members are stored by name (flags by value), for a named tuple, and for a dataclass, of which the
            fields are stored.
        from_plain: Returns the value, given that content. A dataclass is made without its ``__init__``.

    Returns:
        The class, so that this can be used as a decorator.

    Raises:
        TypeError: The class needs ``to_plain`` and ``from_plain``.
        ValueError: Another class has the name.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_type needs a class, got {cls!r}")
    if (to_plain is None) != (from_plain is None):
        raise TypeError("register_type needs both to_plain and from_plain, or none of them")
    if to_plain is None or from_plain is None:
        found = _conversions(cls)
        if found is None:
            raise TypeError(
                f"{_full_name(cls)} must be an Enum, a named tuple or a dataclass, "
                "or register_type needs to_plain and from_plain"
            )
        to_plain, from_plain = found
    name = name or _full_name(cls)
    before = _BY_NAME.get(name)
    # A class that a notebook or a reload has defined anew takes the place of the one before.
    if before is not None and _full_name(before.cls) != _full_name(cls):
        raise ValueError(
            f"the name {name} is taken by {_full_name(before.cls)}: give register_type another name"
        )
    if before is not None:
        _BY_CLASS.pop(before.cls, None)
    # A class has one name in what is saved; snapshots with an earlier one can still be read.
    _BY_CLASS[cls] = _BY_NAME[name] = ValueType(cls, name, to_plain, from_plain)
    return cls


def type_of(value: object) -> ValueType | None:
    """Return how a value is stored; None if its class is not known."""
    found = _BY_CLASS.get(type(value))
    # Looked up, not imported: ciuic imports no framework for a program that does not use it.
    torch = sys.modules.get("torch")
    if found is None and torch is not None and type(value) is torch.Generator:
        return _BY_NAME["torch.Generator"]
    return found


def are_registered(types: Iterable[type]) -> bool:
    """Return whether any of these classes is known."""
    return not _BY_CLASS.keys().isdisjoint(types)


def from_plain(name: str, plain: Any) -> Any:
    """Return the value that was stored.

    Raises:
        UnknownType: No class is registered under this name.
        ValueError: The content does not fit.
    """
    found = _BY_NAME.get(name)
    if found is None:
        raise UnknownType(
            f"the snapshot holds a value of the class {name}, which this program has not registered: "
            f"call ciuic.training.register_type with the class, and with the name {name!r} if it has moved"
        )
    try:
        return found.from_plain(plain)
    # A denominator of 0, a text that is no Decimal, a time zone that cannot be read, arguments that are not
    # those of the class.
    except (ValueError, ArithmeticError, OSError, *MALFORMED) as error:
        raise ValueError(f"a value of the class {name} cannot be made: {error!r}") from None


def is_standard(name: str) -> bool:
    """Return whether a name in snapshots is that of a class which needs no registration."""
    return name in _STANDARD_NAMES


def can_register(value: object) -> bool:
    """Return whether `register_type` with the class alone would make a value storable."""
    return _conversions(type(value)) is not None


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _conversions(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return the conversions that follow from the kind of a class; None if none do."""
    if issubclass(cls, enum.Flag):
        # A union of flags has no name of its own.
        return (lambda value: value.value), cls
    if issubclass(cls, enum.Enum):
        return (lambda value: value.name), (lambda name: cls[name])
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make"):
        return list, cls._make
    if dataclasses.is_dataclass(cls):
        return _fields_of, lambda plain: _dataclass_of(cls, plain)
    return None


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _dataclass_of(cls: Any, plain: dict[str, Any]) -> Any:
    """Make an instance without `__init__`, which may have other arguments, or do more than set fields."""
    made = object.__new__(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [name for name in plain if name not in fields]:
        raise ValueError(f"{_full_name(cls)} has no field {', '.join(unknown)}, and the snapshot has it")
    for name, field in fields.items():
        if name in plain:
            value = plain[name]
        # Fields that the class got since the snapshot.
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            value = field.default
        else:
            raise ValueError(f"{_full_name(cls)} has a field {name}, which the snapshot does not have")
        # Not by the class's own __setattr__: that of a frozen dataclass refuses.
        object.__setattr__(made, name, value)
    return made


def _path_text(path: pathlib.PurePath) -> Any:
    """Return a path as text, or as bytes where it is not UTF-8, which JSON could not hold."""
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        return os.fsencode(text)
    return text


def _path(cls: type) -> Callable[[Any], Any]:
    return lambda text: cls(os.fsdecode(text))


def _time_parts(value: datetime.datetime | datetime.time) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold]


def _datetime(plain: list[Any]) -> datetime.datetime:
    *parts, fold = plain
    return datetime.datetime(*parts, fold=fold)  # noqa: DTZ001 (one without a time zone comes back so)


def _time(plain: list[Any]) -> datetime.time:
    *parts, fold = plain
    return datetime.time(*parts, fold=fold)


def _zone_key(value: zoneinfo.ZoneInfo) -> str:
    if value.key is None:
        raise ValueError("a ZoneInfo without a key, which was made from a file")
    return value.key


def _deque(plain: dict[str, Any]) -> collections.deque[Any]:
    return collections.deque(plain["items"], plain["maxlen"])


def _bytes_io(plain: list[Any]) -> io.BytesIO:
    content, position = plain
    made = io.BytesIO(content)
    made.seek(position)
    return made


def _generator(plain: dict[str, Any]) -> Any:
    import torch  # type: ignore[import-not-found, unused-ignore]

    made = torch.Generator(plain["device"])
    made.set_state(plain["state"])
    return made


_STANDARD: Final = (
    ValueType(pathlib.PurePosixPath, "PurePosixPath", _path_text, _path(pathlib.PurePosixPath)),
    ValueType(pathlib.PureWindowsPath, "PureWindowsPath", _path_text, _path(pathlib.PureWindowsPath)),
    ValueType(type(pathlib.Path()), "Path", _path_text, _path(pathlib.Path)),
    ValueType(
        datetime.datetime,
        "datetime",
        lambda value: [value.year, value.month, value.day, *_time_parts(value)],
        _datetime,
    ),
    ValueType(
        datetime.date,
        "date",
        lambda value: [value.year, value.month, value.day],
        lambda plain: datetime.date(*plain),
    ),
    ValueType(datetime.time, "time", _time_parts, _time),
    ValueType(
        datetime.timedelta,
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda plain: datetime.timedelta(*plain),
    ),
    ValueType(
        datetime.timezone,
        "timezone",
        # What pickle and copy use: the offset, and the name if it was given one.
        lambda value: list(value.__getinitargs__()),
        lambda plain: datetime.timezone(*plain),
    ),
    ValueType(zoneinfo.ZoneInfo, "ZoneInfo", _zone_key, zoneinfo.ZoneInfo),
    ValueType(
        range,
        "range",
        lambda value: [value.start, value.stop, value.step],
        lambda plain: range(*plain),
    ),
    ValueType(
        slice,
        "slice",
        lambda value: [value.start, value.stop, value.step],
        lambda plain: slice(*plain),
    ),
    ValueType(
        fractions.Fraction,
        "Fraction",
        lambda value: [value.numerator, value.denominator],
        lambda plain: fractions.Fraction(*plain),
    ),
    ValueType(decimal.Decimal, "Decimal", str, decimal.Decimal),
    ValueType(uuid.UUID, "UUID", str, uuid.UUID),
    ValueType(io.BytesIO, "BytesIO", lambda value: [value.getvalue(), value.tell()], _bytes_io),
    ValueType(
        collections.deque,
        "deque",
        lambda value: {"items": list(value), "maxlen": value.maxlen},
        _deque,
    ),
)
_BY_CLASS: Final[dict[type, ValueType]] = {one.cls: one for one in _STANDARD}
_BY_NAME: Final[dict[str, ValueType]] = {one.name: one for one in _STANDARD} | {
    "torch.Generator": ValueType(
        object,
        "torch.Generator",
        lambda value: {"device": str(value.device), "state": value.get_state()},
        _generator,
    )
}
_STANDARD_NAMES: Final = frozenset(_BY_NAME)
