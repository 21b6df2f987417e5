"""Numbers of trainings in files that they write: losses and norms with their steps.

Formats: JSON lines, with the number under the key and the step under `step`; event files of TensorBoard (a name with ``tfevents``): TFRecords with scalars,
as `simple_value` or as a tensor of one float. A record whose length does not fit its checksum ends the file. Files are hostile: whoever reads them does so in a
process with limits.

References:
    tensorflow/core/lib/io/record_writer.h (TFRecord), tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto and
    tensor.proto; protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import fnmatch
import json
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

from ciuic.system.disk import READ_FILE
from ciuic.verdicts.formats.tensor_bundle import masked_crc32c

MAX_READ_BYTES: Final = 4 << 20
MAX_NUMBERS: Final = 1000
"""Newest numbers of a file that one look returns."""
_MAX_RECORD_BYTES: Final = 1 << 20
"""Larger records (images, graphs) are passed over."""
_MAX_NAMES: Final = 1 << 18
"""Limit of the names of a folder that are looked at for a pattern."""
_MAX_WORD: Final = 2**63 - 1
_LENGTH: Final = struct.Struct("<QI")
_FLOAT: Final = struct.Struct("<f")
_DOUBLE: Final = struct.Struct("<d")
_Word = Annotated[int, msgspec.Meta(ge=0, le=_MAX_WORD)]


class NumberPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where to read on."""

    file: str
    """Path, whose last part may be a pattern: the file that was changed last is read."""
    key: str
    path: str = ""
    """File that was read last; empty: none was."""
    inode: _Word = 0
    offset: _Word = 0


class NumbersRead(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers read from one file, and where the next read begins."""

    path: str = ""
    inode: _Word = 0
    offset: _Word = 0
    numbers: tuple[tuple[_Word, str], ...] = ()
    """(step, number as text): JSON has no NaN."""
    problem: str = ""
    has_more: bool = False
    """The look ended before the end of the file."""


class _Records(NamedTuple):
    """Numbers of a piece of a file, and the bytes of whole records in it."""

    numbers: list[tuple[int, float]]
    used: int


def json_lines(data: bytes, key: str) -> _Records:
    """Return the numbers under a key in whole lines of JSON; other lines are passed over."""
    end = data.rfind(b"\n") + 1
    found: list[tuple[int, float]] = []
    for line in data[:end].splitlines():
        try:
            # Python's own parser: trainings write NaN and Infinity, which JSON does not have.
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(document, dict):
            continue
        value, step = document.get(key), document.get("step", 0)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            with suppress(OverflowError):
                found.append((_step(step), float(value)))
    return _Records(found, end)


def _step(value: object) -> int:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if is_whole and 0 <= value <= _MAX_WORD else 0  # type: ignore[call-overload,operator]


def tensorboard_events(data: bytes, key: str) -> _Records:
    """Return the scalars with a tag in whole records.

    Raises:
        ValueError: the length of a record does not fit its checksum.
    """
    found: list[tuple[int, float]] = []
    at = 0
    while at + _LENGTH.size <= len(data):
        length, checksum = _LENGTH.unpack_from(data, at)
        if masked_crc32c(data[at : at + 8]) != checksum:
            raise ValueError("it has a record whose length does not fit its checksum")
        end = at + _LENGTH.size + length + 4
        if end > len(data):
            break
        if length <= _MAX_RECORD_BYTES:
            with suppress(ValueError, struct.error):
                found.extend(_scalars(data[at + _LENGTH.size : end - 4], key.encode()))
        at = end
    return _Records(found, at)


def _scalars(event: bytes, tag: bytes) -> Iterator[tuple[int, float]]:
    step, summaries = 0, []
    for number, value in _fields(event):
        if number == 2 and isinstance(value, int):
            step = _step(value)
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in _fields(summary):
            if number == 1 and isinstance(value, bytes):
                fields = dict(_fields(value))
                scalar = fields.get(2, fields.get(8))
                if fields.get(1) == tag and isinstance(scalar, bytes):
                    yield from ((step, one) for one in _scalar(scalar, is_tensor=2 not in fields))


def _scalar(data: bytes, *, is_tensor: bool) -> Iterator[float]:
    if not is_tensor:
        yield _FLOAT.unpack(data)[0]
        return
    fields = dict(_fields(data))
    number = fields.get(1)
    kind = _FLOAT if number == 1 else _DOUBLE if number == 2 else None
    content = fields.get(4, fields.get(5 if kind is _FLOAT else 6))
    # A tensor of several numbers is no scalar.
    if kind is not None and isinstance(content, bytes) and len(content) == kind.size:
        yield kind.unpack(content)[0]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message; ValueError for anything else."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        else:
            length = {1: 8, 5: 4}.get(kind, len(message) + 1)
        if at + length > len(message):
            raise ValueError("a field goes beyond its message")
        yield tag >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number has no end")


@contextmanager
def open_numbers(pattern: str) -> Iterator[tuple[str, int, os.stat_result]]:
    """Yield path, descriptor and attributes of the file; of those that match a pattern, of the one that was changed last.

    Raises:
        OSError: there is none that can be opened, or it is no regular file.
    """
    path = _newest(pattern)
    # Neither a fifo nor a link in the place of the file must lead this process anywhere.
    fd = os.open(path, READ_FILE)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(0, "it is no regular file")
        yield path, fd, facts
    finally:
        os.close(fd)


def is_event_file(path: str) -> bool:
    """Return whether a file is one of TensorBoard, by its name."""
    return "tfevents" in os.path.basename(path)


def read_numbers(place: NumberPlace) -> NumbersRead:
    """Read what has come since the last look."""
    try:
        with open_numbers(place.file) as (path, fd, facts):
            is_same = (path, facts.st_ino) == (place.path, place.inode) and place.offset <= facts.st_size
            offset = place.offset if is_same else 0
            # Of lines the end is enough; records have to be read from the beginning.
            if not is_event_file(path) and facts.st_size - offset > MAX_READ_BYTES:
                offset = facts.st_size - MAX_READ_BYTES
            data = os.pread(fd, MAX_READ_BYTES, offset)
    except OSError as error:
        return NumbersRead(problem=error.strerror or "it cannot be read")
    piece = _piece(data, place.key, is_events=is_event_file(path))
    # A record that is still being written.
    used = piece.used if offset + piece.used <= facts.st_size else 0
    return NumbersRead(
        path=path,
        inode=facts.st_ino,
        offset=offset + used,
        numbers=tuple((step, repr(number)) for step, number in piece.numbers[-MAX_NUMBERS:]),
        problem=piece.problem,
        has_more=offset + len(data) < facts.st_size,
    )


class _Piece(NamedTuple):
    numbers: list[tuple[int, float]]
    used: int
    problem: str


def _piece(data: bytes, key: str, *, is_events: bool) -> _Piece:
    """Return the numbers in whole lines or records of a piece of at most `MAX_READ_BYTES`, and where the next begins."""
    problem = ""
    try:
        found = (tensorboard_events if is_events else json_lines)(data, key)
    except ValueError as error:
        found, problem = _Records([], 0), str(error)
    used = found.used
    # A record, or a line, that is longer than what is read at once.
    if not used and len(data) == MAX_READ_BYTES:
        used = _LENGTH.size + _LENGTH.unpack_from(data)[0] + 4 if is_events and not problem else len(data)
    return _Piece(found.numbers, used, problem)


def all_numbers(
    read: Callable[[int, int], bytes], size_bytes: int, key: str, *, is_events: bool, most_bytes: int
) -> list[tuple[int, float]]:
    """Return the (step, number) of a whole file, of lines that are longer than is read those at the end.

    Args:
        read: Returns the bytes at an offset, at most so many.
        size_bytes: Size of the file.
        key: Key of the number, or tag of the scalar.
        is_events: It is a file of TensorBoard.
        most_bytes: Limit of what is read.
    """
    found: list[tuple[int, float]] = []
    at = 0 if is_events else max(0, size_bytes - most_bytes)
    stop = min(size_bytes, at + most_bytes)
    while at < stop:
        piece = _piece(read(at, min(MAX_READ_BYTES, size_bytes - at)), key, is_events=is_events)
        found += piece.numbers
        if piece.problem or not piece.used:
            break
        at += piece.used
    return found


def _newest(pattern: str) -> str:
    folder, name = os.path.split(pattern)
    if not is_pattern(name):
        return pattern
    # One after the other: a folder of millions of names must not take the memory of the places after it.
    with os.scandir(folder) as items:
        newest = newest_match(
            ((item.name, item) for item in items),
            name,
            lambda item: item.stat(follow_symlinks=False).st_mtime_ns,
        )
    if newest is None:
        raise FileNotFoundError(2, "no file matches")
    return newest.path


_Item = TypeVar("_Item")


def is_pattern(name: str) -> bool:
    """Return whether a name is a shell pattern."""
    return not set(name).isdisjoint("*?[")


def newest_match(
    items: Iterable[tuple[str, _Item]], pattern: str, mtime_ns: Callable[[_Item], int]
) -> _Item | None:
    """Return the item, of (name, item), whose name matches and that was changed last; None if no name matches."""
    newest: tuple[int, str, _Item] | None = None
    for name, item in islice(items, _MAX_NAMES):
        if fnmatch.fnmatch(name, pattern):
            at = mtime_ns(item)
            if newest is None or (at, name) > newest[:2]:
                newest = at, name, item
    return None if newest is None else newest[2]
