"""Objects of the documents that ``--json`` prints, made from the records that commands have.

A table of keys is at once what docs/cli.md says of an object and what makes it: the page cannot name a key that is not printed, and
no key is printed that the page does not name. A value that a record has under the name of the key is not repeated by the command.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from ciuic.cli.shared.messages import json_name
from ciuic.cli.shared.times import rfc3339
from ciuic.types import Snapshot

_KEY: Final = r"(\w+)(\??|\|null)((?: \((?:[^()]|\([^()]*\))*\))?)(?:, |$)"
"""A key, its mark, and a note in parentheses. Where no record has a value ``?`` leaves the key out, and ``|null`` makes it
null, as it makes an empty text."""

_MISSING: Final = object()


class Keys:
    """The keys of an object, in the order in which they are printed."""

    titled: ClassVar[list[Keys]] = []
    """The tables of all modules that are loaded, for the page."""

    def __init__(self, text: str, title: str = "", **inner: Keys) -> None:
        """``text``: the keys, as ``id, parent|null, files? (of a directory)``; ``inner``: keys of the object, or the objects, below a key.

        ``title``: what the page calls the object; it is shown with the object around it where it has none.
        """
        self.text = text
        self.title = title
        self._inner = inner
        self._marks: dict[str, str] = {}
        if title:
            Keys.titled.append(self)

    def of(self, *records: object, **values: object) -> dict[str, Any]:
        """Return the object: each key is taken from ``values``, else from the first record that has an attribute of its name.

        Where there is no ``time`` but a ``time_ns``, the former is the latter in RFC 3339.

        Raises:
            AttributeError: a key has no value.
        """
        # Not when it is made: most runs print no document.
        self._marks = self._marks or {name: mark for name, mark, _ in re.findall(_KEY, self.text)}
        document: dict[str, Any] = {}
        for name, mark in self._marks.items():
            found = _found(name, records, values)
            if found is _MISSING:
                found = _found(f"{name}_ns", records, values)
                if isinstance(found, int):
                    found = rfc3339(found) if found or not mark else ""
            if found is _MISSING and not mark:
                raise AttributeError(f"no value of the key {name} among: {self.text}")
            # An empty name is no value; an empty text is one, unless it stands for null.
            if mark == "?" and (found is _MISSING or found == b""):
                continue
            is_null = mark == "|null" and (found is _MISSING or found in ("", b""))
            document.update(_entry(name, None if is_null else found, self._inner.get(name)))
        return document

    def all(self, records: Iterable[object]) -> list[dict[str, Any]]:
        """Return an object of each record; one that is made already stays."""
        return [record if isinstance(record, dict) else self.of(record) for record in records]

    def markdown(self) -> str:
        """Return the keys as the page has them."""
        return ", ".join(
            f"`{name}`{self._below(name)}{' or null' if mark == '|null' else ''}{note}"
            for name, mark, note in re.findall(_KEY, self.text)
        )

    def _below(self, name: str) -> str:
        inner = self._inner.get(name)
        return "" if inner is None or inner.title else f" {{{inner.markdown()}}}"


def _found(name: str, records: tuple[object, ...], values: dict[str, object]) -> object:
    if name in values:
        return values[name]
    return next((getattr(one, name) for one in records if hasattr(one, name)), _MISSING)


def _entry(name: str, value: Any, inner: Keys | None = None) -> dict[str, Any]:
    if isinstance(value, bytes):
        return json_name(name, value)
    if name == "mode" and isinstance(value, int):
        return {name: f"{value & 0o7777:04o}"}
    if inner is not None and value is not None and not isinstance(value, dict):
        # A record may be a tuple, too.
        is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_asdict")
        return {name: inner.all(value) if is_list else inner.of(value)}
    return {name: _plain(value)}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, of types that are JSON's own: a snapshot as its id, names in a list as objects with the key ``path``, no number for infinity."""
    if isinstance(value, Snapshot):
        return str(value.id)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "_asdict"):
        return {key: part for name, one in value._asdict().items() for key, part in _entry(name, one).items()}
    if isinstance(value, (list, tuple)):
        return [json_name("path", part) if isinstance(part, bytes) else _plain(part) for part in value]
    return value
