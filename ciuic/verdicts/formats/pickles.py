"""Structure of pickles and of torch's checkpoints before 1.6, by opcodes alone: nothing is executed or made.

torch's old format is five pickles (a magic number, a version, facts of the machine, the object, the keys of its storages), and the
storages in the order of these keys: 8 bytes with the number of items, and the items.

References:
    https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ciuic.units import plural
from ciuic.verdicts.model import BoundedReader, NotJudged, Numbers, OtherFormat, Piece, Structure, TornContent

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


SUFFIXES: Final = (".pkl", ".pickle", ".pt", ".pth", ".joblib")
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_MAX_STORAGES: Final = 1 << 17
_ITEM_BYTES: Final = {
    b"Double": 8, b"Long": 8, b"ComplexFloat": 8, b"ComplexDouble": 16, b"Float": 4, b"Int": 4,
    b"Half": 2, b"BFloat16": 2, b"Short": 2, b"Char": 1, b"Byte": 1, b"Bool": 1, b"Untyped": 1,
}  # fmt: skip
NUMBERS: Final = {
    b"Double": "F64", b"Float": "F32", b"Half": "F16", b"BFloat16": "BF16", b"ComplexFloat": "F32", b"ComplexDouble": "F64",
}  # fmt: skip
"""Kinds in `ciuic.verdicts.not_finite.KINDS` of the storages that have floating numbers."""
UNTYPED: Final = b"Untyped"
"""Storage of which only the tensor says what is in it."""
_INTEGERS: Final = (b"Long", b"Int", b"Short", b"Char", b"Byte", b"Bool", b"Untyped")


def read_pickle(reader: BoundedReader) -> Structure:
    """Return the structure; raise TornContent, OtherFormat or NotJudged."""
    head = reader.up_to(0, 2, "the beginning")
    if head[:1] != b"\x80" or not 2 <= (head[1] if len(head) > 1 else 0) <= 5:
        if reader.has_suffix(*SUFFIXES):
            if reader.starts_with_zeros():
                raise TornContent("it begins with zeros: its beginning was never written")
            # Protocols 0 and 1 have no mark: any text could be one.
            raise NotJudged("it begins neither as a zip archive nor as a pickle of protocol 2 or later")
        raise OtherFormat
    stream = PickleStream(reader)
    first = [code for code in stream.opcodes() if code.name == "LONG1"]
    if first and first[0].argument == _MAGIC:
        return _old_torch(reader, stream)
    if stream.at != reader.size_bytes:
        raise NotJudged(f"its pickle ends after {stream.at} of {reader.size_bytes} bytes")
    return Structure("pickle", "one pickle", (Piece(0, stream.at),))


def _old_torch(reader: BoundedReader, stream: PickleStream) -> Structure:
    for _ in range(2):
        for _ in stream.opcodes():
            pass
    storages = Storages()
    for code in stream.opcodes():
        storages.see(code)
    keys = [code.argument for code in stream.opcodes() if code.name.endswith("BINUNICODE")]
    start = stream.at
    kind, item_bytes, end = b"Byte", 1, start
    numbers = []
    for key in keys:
        if key not in storages.kinds:
            raise NotJudged("one of its storages has a type that is not known here")
        kind = storages.kinds[key]
        item_bytes = _ITEM_BYTES[kind]
        count = int.from_bytes(stream.take(8), "little")
        if count >= 1 << 48:
            raise TornContent("a storage has an impossible length")
        stream.skip(count * item_bytes)
        if kind in NUMBERS:
            numbers.append(Numbers(stream.at - count * item_bytes, stream.at, NUMBERS[kind]))
        end = stream.at
    if stream.at != reader.size_bytes:
        raise TornContent(f"its storages end after {stream.at} of {reader.size_bytes} bytes")
    # An integer may end in zeros, a float hardly ever does.
    last_item = (end - (item_bytes if kind in _INTEGERS else 1), end) if end > start else None
    content = plural(len(keys), "storage")
    is_known = UNTYPED not in storages.kinds.values()
    return Structure(
        "torch (old)", content, (Piece(0, stream.at),), last_item, (lambda: numbers) if is_known else None
    )


class Storages:
    """Types of the storages that a pickle refers to: tuples ("storage", type, key, …) before each BINPERSID."""

    def __init__(self) -> None:
        self.kinds: dict[bytes, bytes] = {}
        self._memo: dict[int, Any] = {}
        self._since_mark: list[Any] = []

    def see(self, code: Opcode) -> None:
        """Take the next opcode."""
        name, argument = code
        if name == "MARK":
            self._since_mark = []
        elif name in ("BINPUT", "LONG_BINPUT"):
            if self._since_mark and len(self._memo) < _MAX_STORAGES:
                self._memo[argument] = self._since_mark[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._since_mark.append(self._memo.get(argument))
        elif name == "BINPERSID":
            self._note()
        elif name != "TUPLE":
            self._since_mark.append(argument)
        # More than the five or six of a reference are of something else.
        del self._since_mark[:-16]

    def _note(self) -> None:
        values = [value for value in self._since_mark if isinstance(value, bytes)]
        if len(values) < 3 or values[0] != b"storage" or len(self.kinds) >= _MAX_STORAGES:
            return
        kind = values[1].rpartition(b"\n")[2].removesuffix(b"Storage")
        if kind in _ITEM_BYTES:
            self.kinds[values[2]] = kind
