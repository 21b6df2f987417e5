"""Keys that follow from the structs of `ciuic.config.model`: names, parsers, where values go, and how they are shown.

Both file formats, the suggestions for typing errors and the rows of ``config show`` follow from them; docs/configuration.md explains
each key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeGuard,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec.structs import replace

from ciuic.config.model import DEFAULT, NO_KEY, Config, Origin
from ciuic.config.values import (
    change_value,
    count_value,
    duration_value,
    flag_value,
    interval_value,
    one_of_value,
    path_value,
    show_value,
    tags_value,
)
from ciuic.units import format_duration, format_size

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
FLAT_ROOTS_NAME = "protected_directories"
FLAT_NAMES: Mapping[str, str] = {
    "exclude_patterns": "exclude",
    "snapshot_dir": "repository.path",
    "snapshot_interval": "schedule.interval",
    "retention_policy": "retention.keep_within",
    "io_priority": "capture.io_priority",
}
"""Name in the flat format → dotted name."""
_PARSERS: Mapping[object, Callable[[object], Any]] = {
    int: count_value,
    bool: flag_value,
    Path: path_value,
    tuple[str, ...]: tags_value,
}
"""Parsers of types whose annotation has none."""
_UNITS: Mapping[str, Callable[[Any], str]] = {"_seconds": format_duration, "_bytes": format_size}


def is_flat(path: Path) -> bool:
    """Return whether a file of this name is in the flat format: it ends in ``.conf``."""
    return path.suffix == ".conf"


class Key(msgspec.Struct, frozen=True):
    """Configuration key."""

    name: str
    """Name within its table, with a dot for a table in it."""
    parse: Callable[[object], Any]
    show: Callable[[Any], str]
    field: str
    """Attribute that has the value, in the struct of the table, with a dot for a struct in it."""

    def show_effective(self, config: object) -> str:
        """Return the value that a configuration has, as the operator would write it; an empty text for none."""
        value = attrgetter(self.field)(config)
        # A zero that could not be written stands for none.
        is_none = value is None or (value == 0 and self.parse in (interval_value, change_value))
        return "" if is_none else self.show(value)


class Table:
    """Keys of a struct, and the lists of tables that it has."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self.struct = struct
        self.keys: dict[str, Key] = {}
        self.lists: dict[str, tuple[str, Table]] = {}
        """Name of a list of tables → field, and the table of each element."""
        self._add(struct, "")
        self.sections = tuple(dict.fromkeys(name.partition(".")[0] for name in self.keys if "." in name))
        """Names of the tables in it that are there once."""
        names, defaults = struct.__struct_fields__, struct.__struct_defaults__
        # The last fields have the defaults; among keyword-only ones, some of those are the mark of none.
        unset = (msgspec.NODEFAULT,) * (len(names) - len(defaults))
        required = [
            name for name, value in zip(names, unset + defaults, strict=True) if value is msgspec.NODEFAULT
        ]
        self.required = tuple(key for key in self.keys.values() if key.field in required)

    def _add(self, struct: type[msgspec.Struct], section: str) -> None:
        for field, hint in _hints(struct).items():
            kind, extras = _split(hint)
            names = [extra for extra in extras if isinstance(extra, str)]
            functions = [extra for extra in extras if callable(extra)]
            unit = next((suffix for suffix in _UNITS if field.endswith(suffix)), "")
            name = names[0] if names else section + field.removesuffix(unit)
            element = get_args(kind)[0] if get_origin(kind) is tuple else None
            parse = functions[0] if functions else _parser(kind, unit)
            if _is_struct(element):
                self.lists[name] = field, Table(element)
            elif parse is None and _is_struct(kind):
                self._add(kind, f"{field}.")
            elif parse is not None and name != NO_KEY:
                show = functions[1] if len(functions) > 1 else _UNITS.get(unit, show_value)
                self.keys[name] = Key(name, parse, show, section + field)

    def with_values(self, base: _Struct, values: Mapping[str, Any]) -> _Struct:
        """Return a copy of a struct that has these values, by their keys, also in the structs within it."""
        own: dict[str, Any] = {}
        for name, value in values.items():
            section, dot, field = self.keys[name].field.partition(".")
            own[section] = (
                replace(own.get(section, getattr(base, section)), **{field: value}) if dot else value
            )
        return replace(base, **own)


@cache
def _hints(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the types of the fields; only texts are evaluated, which takes a tenth of a millisecond for a struct."""
    hints = struct.__annotations__
    is_text = any(isinstance(hint, str) for hint in hints.values())
    return get_type_hints(struct, include_extras=True) if is_text else hints


def _is_struct(kind: object) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not Origin


def _split(hint: Any) -> tuple[Any, list[Any]]:
    """Return a type without ``None`` and without annotations, and the annotations, outer ones first."""
    extras: list[Any] = []
    while True:
        if hasattr(hint, "__metadata__"):
            extras += hint.__metadata__
            hint = hint.__origin__
        elif NoneType in getattr(hint, "__args__", ()):
            hint = hint.__args__[0]
        else:
            return hint, extras


def _parser(kind: Any, unit: str) -> Callable[[object], Any] | None:
    if get_origin(kind) is Literal:
        return one_of_value(get_args(kind))
    return duration_value if unit == "_seconds" else _PARSERS.get(kind)


TOP = Table(Config)
KEYS = TOP.keys
REMOTE = TOP.lists["remote"][1]
REMOTE_KEYS = REMOTE.keys
"""Keys of one ``[remote]``; a dot stands for a table in it, such as ``[remote.keep]``."""


class ShownValue(NamedTuple):
    """Row of ``config show``; ``root[0].path`` and so on for the roots; no text for a value not set."""

    key: str
    value: str
    origin: Origin


def shown(config: Config) -> Iterator[ShownValue]:
    """Yield every key in the order of the documentation, then those of roots, trainers, remotes and so on."""
    yield from _shown(config, TOP, "", config.origins, DEFAULT)


def _shown(
    struct: object, table: Table, prefix: str, origins: Mapping[str, Origin], origin: Origin
) -> Iterator[ShownValue]:
    for name, key in table.keys.items():
        yield ShownValue(prefix + name, key.show_effective(struct), origins.get(name, origin))
    for name, (field, inner) in table.lists.items():
        for index, one in enumerate(getattr(struct, field)):
            # Only a remote knows the origin of each key; of a tier it is that of the remote.
            known = getattr(one, "origins", None)
            begin = (
                DEFAULT if known is not None else getattr(one, "origin", getattr(struct, "origin", DEFAULT))
            )
            yield from _shown(one, inner, f"{prefix}{name}[{index}].", known or {}, begin)
