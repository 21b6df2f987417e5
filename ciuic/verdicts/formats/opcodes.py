"""Opcodes of a pickle, one after the other, without executing one and without reading long arguments.

References:
    https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ciuic.verdicts.bounded_reader import BoundedReader
from ciuic.verdicts.model import NotJudged, TornContent

_MAX_OPCODES: Final = 1 << 20
"""Limit of opcodes of one file: a second of processor time."""
_MAX_KEPT_BYTES: Final = 1 << 16
"""Arguments up to this length are decoded, longer ones are passed over."""
_MAX_LINE_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 1 << 16
_PREFIX_BYTES: Final = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TEXTS: Final = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_NUMBERS: Final = {"BININT", "BININT1", "BININT2", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
_OPCODES: Final = {known.code: known for known in pickletools.opcodes}
_SIGNED: Final = {"BININT", "LONG1"}


class Opcode(NamedTuple):
    """An opcode. ``argument`` is the text or number of opcodes that have one, as far as it is short."""

    name: str
    argument: Any = None


class PickleStream:
    """Pickles in a file, from an offset on."""

    def __init__(self, reader: BoundedReader, at: int = 0) -> None:
        self._reader = reader
        self.at = at
        """Offset of the next byte."""
        self._left = _MAX_OPCODES
        self._page = b""
        self._page_start = 0

    def opcodes(self) -> Iterator[Opcode]:
        """Yield the opcodes of one pickle, STOP last; `at` is then behind it.

        Raises:
            TornContent: the pickle has no end, or a byte that is no opcode.
            NotJudged: a limit is reached.
        """
        while True:
            self._left -= 1
            if self._left < 0:
                raise NotJudged("its pickle is longer than what is read for a verdict")
            code = self.take(1)
            known = _OPCODES.get(code.decode("latin-1"))
            if known is None:
                raise TornContent(f"its pickle has the byte {code[0]:#04x}, which is no opcode")
            yield Opcode(known.name, self._argument(known.name, known.arg))
            if known.name == "STOP":
                return

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        start = self.at - self._page_start
        if not 0 <= start <= start + length <= len(self._page):
            self._page_start, start = self.at, 0
            self._page = self._reader.up_to(self.at, max(length, _PAGE_BYTES), "its pickle")
            if len(self._page) < length:
                raise TornContent("its pickle has no end")
        self.at += length
        return self._page[start : start + length]

    def skip(self, length: int) -> None:
        """Pass over bytes, which must be there."""
        self.at += length
        if self.at > self._reader.size_bytes:
            raise TornContent("its pickle has no end")

    def _argument(self, name: str, kind: Any) -> Any:
        if kind is None:
            return None
        if kind.n == pickletools.UP_TO_NEWLINE:
            line = self._line()
            # Two lines: module and name.
            return line + b"\n" + self._line() if name in ("GLOBAL", "INST") else line
        if kind.n >= 0:
            data = self.take(kind.n)
            return int.from_bytes(data, "little", signed=name in _SIGNED) if name in _NUMBERS else None
        length = int.from_bytes(self.take(_PREFIX_BYTES[kind.n]), "little")
        if name not in _TEXTS and name != "LONG1":
            self.skip(length)
            return None
        if length > _MAX_KEPT_BYTES:
            self.skip(length)
            return b""
        data = self.take(length)
        return int.from_bytes(data, "little", signed=True) if name == "LONG1" else data

    def _line(self) -> bytes:
        parts: list[bytes] = []
        left_bytes = _MAX_LINE_BYTES
        while left_bytes > 0:
            # At least one byte, with which the page that has it is read.
            self.take(1)
            start = self.at - 1 - self._page_start
            end = self._page.find(b"\n", start, start + left_bytes)
            part = self._page[start : end if end >= 0 else start + left_bytes]
            parts.append(part)
            self.at += len(part) - 1
            if end >= 0:
                self.at += 1
                return b"".join(parts)
            left_bytes -= len(part)
        raise NotJudged("its pickle has a line that is longer than what is read for a verdict")
