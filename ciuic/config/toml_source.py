"""Positions in a TOML text: lines of keys, and spans of statements for careful editing.

tomli gives values and no positions; this gives positions and no values. Guarantees: for a text that tomli has
accepted, every ``[table]``, ``[[table]]`` and ``key = value`` statement is found with its path, first and
last line, whatever strings, comments and nested brackets lie between. For other texts nothing is promised:
parse first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import tomli

TomlPath = tuple["str | int", ...]
"""Keys from the top; the index of an array-of-tables element stands after its name: ("root", 0, "path")."""


class Statement(NamedTuple):
    """Statement of a TOML text; lines count from 1, ``last_line`` included."""

    kind: Literal["table", "array", "value"]
    path: TomlPath
    first_line: int
    last_line: int


def statements(text: str) -> list[Statement]:
    """Return all statements of ``text`` in their order."""
    return _Scanner(text).run()


def line_numbers(found: Sequence[Statement]) -> Mapping[TomlPath, int]:
    """Return the first line on which each path is stated."""
    lines: dict[TomlPath, int] = {}
    for statement in found:
        lines.setdefault(statement.path, statement.first_line)
    return lines


def line_of(lines: Mapping[TomlPath, int], path: TomlPath) -> int:
    """Return the line of ``path`` or of the nearest enclosing statement (inline tables); 0 for none."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return 0


def quote(text: str) -> str:
    """Return ``text`` as a TOML basic string. ValueError when it is not Unicode."""
    out = []
    for char in text:
        if char in '"\\':
            out.append("\\" + char)
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            out.append(f"\\u{ord(char):04X}")
        elif 0xD800 <= ord(char) <= 0xDFFF:
            raise ValueError(f"{text!r} is not UTF-8 and cannot stand in a TOML file")
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


class _Scanner:
    """Scanner that walks the text once; ``self.at`` is the next character."""

    def __init__(self, text: str) -> None:
        # Same length, so that positions stay true.
        self.text = text.replace("\r\n", " \n")
        self.at = 0
        self.line = 1
        self.table: TomlPath = ()
        self.array_counts: dict[TomlPath, int] = {}

    def run(self) -> list[Statement]:
        """Return all statements."""
        found = []
        while self._skip_blank():
            first_line = self.line
            if self._peek() == "[":
                found.append(self._header(first_line))
            else:
                path = (*self.table, *self._key("="))
                self._value()
                found.append(Statement("value", path, first_line, self.line))
        return found

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _advance(self, count: int = 1) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _skip_blank(self) -> bool:
        while self.at < len(self.text):
            if self._peek() == "#":
                self._skip_comment()
            elif self._peek().isspace():
                self._advance()
            else:
                return True
        return False

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _header(self, first_line: int) -> Statement:
        array = self.text.startswith("[[", self.at)
        self._advance(2 if array else 1)
        path = self._resolve(self._key("]"), array)
        if array:
            self._advance()
        self.table = path
        return Statement("array" if array else "table", path, first_line, self.line)

    def _resolve(self, keys: list[str], array: bool) -> TomlPath:
        """Return a header's keys with the index of the current element after each array's name."""
        path: TomlPath = ()
        for position, key in enumerate(keys):
            path = (*path, key)
            if array and position == len(keys) - 1:
                count = self.array_counts.get(path, 0)
                self.array_counts[path] = count + 1
                # TOML counts: each [[name]] begins the next element, and a header below it means the newest
                # one.
                path = (*path, count)
            elif path in self.array_counts:
                path = (*path, self.array_counts[path] - 1)
        return path

    def _key(self, end: str) -> list[str]:
        """Return the parts of a dotted key; stop after the character ``end``."""
        parts, bare = [], ""
        while True:
            char = self._peek()
            if char in ('"', "'"):
                start = self.at
                self._string()
                # tomli decodes the escapes of a quoted key.
                parts.append(str(tomli.loads(f"k={self.text[start : self.at]}")["k"]))
                continue
            self._advance()
            if char in ("", ".", end) and bare:
                parts.append(bare)
                bare = ""
            if char in ("", end):
                return parts
            if char != "." and not char.isspace():
                bare += char

    def _value(self) -> None:
        """Skip a value: to the end of its line, a comment, or the text."""
        depth = 0
        while self.at < len(self.text):
            char = self._peek()
            if char in "\"'":
                self._string()
                continue
            if char == "#":
                if depth == 0:
                    return
                self._skip_comment()
                continue
            if char == "\n" and depth == 0:
                return
            # Inside brackets a line break does not end the value.
            depth += (char in "[{") - (char in "]}")
            self._advance()

    def _string(self) -> None:
        quote_char = self._peek()
        if self.text.startswith(quote_char * 3, self.at):
            self._multi_line_string(quote_char)
            return
        end = self.at + 1
        while end < len(self.text) and self.text[end] != quote_char:
            end += 2 if self.text[end] == "\\" and quote_char == '"' else 1
        self._advance(end + 1 - self.at)

    def _multi_line_string(self, quote_char: str) -> None:
        end = self.at + 3
        while end < len(self.text) and not self.text.startswith(quote_char * 3, end):
            end += 2 if self.text[end] == "\\" and quote_char == '"' else 1
        end += 3
        # Up to two quotes may stand directly before the closing three and belong to the text.
        while self.text[end : end + 1] == quote_char:
            end += 1
        self._advance(end - self.at)
