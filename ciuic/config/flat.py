r"""The flat ``key = value`` format of older installations: read, convert to TOML, edit.

One setting a line; ``#`` or ``;`` begins a comment line, and `` #`` a comment behind a value; quotes around a
value are taken off; lists are separated by commas (``\,`` is a comma in an item). Guarantees: every setting
is read with its line number, and an unknown one is reported instead of ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ciuic.config.keys import FLAT_NAMES, FLAT_ROOTS_NAME
from ciuic.config.toml_source import quote

_LISTS = ("exclude_patterns", FLAT_ROOTS_NAME)
# Compiled with the first use, as in `ciuic.config.values`. A blank before it is needed: `#` and `;` are characters of
# paths and patterns.
_COMMENT = r"\s[#;].*\Z"
# Names of known settings alone: a value may contain `word =`.
_SETTING = r"(?:\A|[\s#;])({})\s*=".format("|".join((*FLAT_NAMES, FLAT_ROOTS_NAME)))
MIN_SETTINGS_ON_ONE_LINE = 2
"""One setting behind a # was commented out; several on one line were meant to be in force."""


class FlatSetting(NamedTuple):
    """Setting of one line; ``value`` is a list of texts for the keys that hold lists."""

    name: str
    value: str | list[str]
    line: int


class FlatError(ValueError):
    """Line with a syntax error."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def parse_flat(text: str) -> tuple[list[FlatSetting], list[FlatError]]:
    """Return the settings in order, and the syntax errors; load decides which names are known."""
    settings: list[FlatSetting] = []
    errors: list[FlatError] = []
    seen: dict[str, int] = {}
    comments: list[tuple[int, str]] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line[0] in "#;":
            comments.append((number, line))
            continue
        run_together = re.findall(_SETTING, re.sub(_COMMENT, "", line))
        if len(run_together) >= MIN_SETTINGS_ON_ONE_LINE:
            errors.append(_run_together(run_together, number))
            continue
        name, equals, value = line.partition("=")
        name = name.strip()
        if not equals or not name:
            hint = " (tables belong to the TOML format)" if line.startswith("[") else ""
            errors.append(FlatError(f"not of the form key = value: {line!r}{hint}", number))
        # An error, and not the last value: which of the two was meant is not known.
        elif name in seen:
            errors.append(FlatError(f"{name} is set again (first in line {seen[name]})", number))
        else:
            seen[name] = number
            settings.append(FlatSetting(name, _value(name, value), number))
    if not settings and not errors:
        # A whole configuration on one line that begins with its file name as a comment, as it is printed in
        # some places, would be one comment. Beside settings that are in force a comment may say anything.
        errors += [
            _run_together(names, number)
            for number, line in comments
            if len(names := re.findall(_SETTING, line)) >= MIN_SETTINGS_ON_ONE_LINE
        ]
    return settings, errors


def _run_together(names: Sequence[str], number: int) -> FlatError:
    return FlatError(
        f"{len(names)} settings on one line ({', '.join(names)}): every setting needs a line of its own",
        number,
    )


def flat_to_toml(settings: Sequence[FlatSetting]) -> str:
    """Return a TOML text of the same meaning; load has checked ``settings``."""
    values = {setting.name: setting.value for setting in settings}
    lines = ["# Converted from the flat format."]
    tables: dict[str, list[str]] = {}
    for flat_name, name in FLAT_NAMES.items():
        if flat_name not in values:
            continue
        value = values[flat_name]
        text = quote(value) if isinstance(value, str) else "[" + ", ".join(map(quote, value)) + "]"
        table, _, key = name.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {text}")
    # Keys without a table must come before the first table.
    for table in sorted(tables):
        lines += ["", f"[{table}]", *tables[table]] if table else ["", *tables[table]]
    for path in values.get(FLAT_ROOTS_NAME, []):
        lines += ["", "[[root]]", f"path = {quote(path)}"]
    return "\n".join(lines) + "\n"


def set_flat(text: str, name: str, value: str | Sequence[str]) -> str:
    """Return ``text`` with ``name`` set to ``value``, in place if it is set, else in a new last line."""
    written = value if isinstance(value, str) else ", ".join(item.replace(",", "\\,") for item in value)
    # Quotes would not help: `_value` cuts comments off before it takes quotes off.
    if re.search(r"[\r\n]", written) or written != written.strip() or re.search(_COMMENT, written):
        raise ValueError(
            f"cannot stand in the flat format: {written!r}; `ciuic config convert` makes a TOML file"
        )
    # Surrogates stand for bytes that are not UTF-8 (PEP 383).
    if any("\ud800" <= char <= "\udfff" for char in written):
        raise ValueError(f"{written!r} is not UTF-8 and cannot stand in a configuration file")
    lines = text.splitlines(keepends=True)
    for position, line in enumerate(lines):
        before, equals, after = line.partition("=")
        if equals and before.strip() == name:
            comment = re.search(_COMMENT, after.rstrip())
            lines[position] = f"{before.rstrip()} = {written}{comment.group(0) if comment else ''}\n"
            return "".join(lines)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return "".join([*lines, f"{name} = {written}\n"])


def _value(name: str, raw: str) -> str | list[str]:
    value = _unquote(re.sub(_COMMENT, "", raw.rstrip()).strip())
    if name not in _LISTS:
        return value
    items = (item.replace("\\,", ",").strip() for item in re.split(r"(?<!\\),", value))
    return [_unquote(item) for item in items if item]


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'" and value[0] not in value[1:-1]:
        return value[1:-1]
    return value
