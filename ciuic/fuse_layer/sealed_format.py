"""The sealed file: changes of an epoch, as the overlay writes them and capture looks them up.

One definition serves both sides. Guarantees: writing takes the memory of some hundred changes, whatever their
number, and lets other threads have the interpreter in between; so does reading, which keeps changes beyond a
limit in tables of a Spill. A file that was cut short is refused. docs/architecture.md, section 4, says what
the fields mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final, NamedTuple

import msgspec

from ciuic.fuse_layer.undo_format import SealedChange, UndoDamaged, sealed_name
from ciuic.structs import msgpack_decoder
from ciuic.system.disk import Disk
from ciuic.system.spill import NameTable, NumberTable, Spill

SEALED_VERSION: Final = 2
_LENGTH_BYTES: Final = 4
_MAX_FRAME_BYTES: Final = 64 << 20
# A frame is encoded in one call that keeps the interpreter from serving threads, and is decoded as a whole by
# a reader: both are bounded, whatever the number of changes.
_FRAME_CHANGES: Final = 256
_FRAME_DATA_BYTES: Final = 256 << 10
_MAX_FRAME_NAMES: Final = 1024
"""Limit of a directory's names in one frame; where there are more, all of them lie in frames of their own."""
_NO_NAMES: Final[dict[bytes, int]] = {}


class Unheld(msgspec.Struct, array_like=True, frozen=True):
    """A file that is written past the worker, and whose content the cut could not save (core/passthrough_writers.py)."""

    ino: int
    size_bytes: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    """``size_bytes`` and times under the hold."""
    provable: bool = False
    """True if equal size and times after the capture prove that the content is still that of the cut."""
    until_ns: int = 0
    """Wall clock at the end of the copy that the undo log has; 0 where it has none."""


class SealedHead(msgspec.Struct, kw_only=True):
    """Facts of the epoch as a whole; the first frame."""

    version: int = SEALED_VERSION
    session: str
    epoch: int
    since: int
    cut_ns: int
    complete: bool
    root_ino: int
    block_size: int
    open_for_write: list[int]
    unheld: list[Unheld] | None = None
    """Files that the cut could not hold; None from a worker of an older version: every file open for writing
    is as found then."""


class _Changes(msgspec.Struct, array_like=True, tag="c"):
    """Some changes, each an inode number and a SealedChange."""

    changes: list[tuple[int, msgspec.Raw]]


class _Names(msgspec.Struct, array_like=True, tag="n"):
    """Some touched names of a directory whose change says that they lie apart."""

    ino: int
    names: dict[bytes, int]


class Totals(msgspec.Struct, array_like=True, tag="e"):
    """The last frame."""

    inodes: int
    names: int
    """Number of touched names."""
    blocks: int
    """Number of changed blocks, of files that have not changed as a whole."""
    whole_files: int


class _Version(msgspec.Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgpack_decoder(SealedHead)
_version_decoder = msgpack_decoder(_Version)
_frame_decoder = msgpack_decoder(_Changes | _Names | Totals)
_change_decoder = msgpack_decoder(SealedChange)


def write_sealed(
    undo_dir: str | bytes, head: SealedHead, changes: Iterable[tuple[int, SealedChange]]
) -> None:
    """Write the sealed file of an epoch; it gets its name when it is whole."""
    # Not synced: no reader outlives the machine.
    final = os.path.join(os.fsdecode(undo_dir), sealed_name(head.epoch))
    with Disk().replacing(final, durable=False) as fd, os.fdopen(fd, "wb", closefd=False) as file:
        _write_frame(file, head)
        for frame in _frames(changes):
            _write_frame(file, frame)


def _write_frame(file: BinaryIO, content: object) -> None:
    body = _encoder.encode(content)
    file.write(len(body).to_bytes(_LENGTH_BYTES, "little"))
    file.write(body)


def _frames(changes: Iterable[tuple[int, SealedChange]]) -> Iterator[_Changes | _Names | Totals]:
    total = Totals(0, 0, 0, 0)
    batch: list[tuple[int, msgspec.Raw]] = []
    batch_bytes = 0
    # A frame at a time, so that neither side ever has a million changes encoded in memory.
    for ino, change in changes:
        names, data = change.names, change.data
        total.inodes += 1
        if names:
            total.names += len(names)
            if len(names) > _MAX_FRAME_NAMES:
                yield from _names_apart(ino, names)
                change = SealedChange(change.fresh, change.attrs, data, None, True)
        elif isinstance(data, bytes):
            total.blocks += int.from_bytes(data, "little").bit_count()
        elif data:
            total.whole_files += 1
        body = _encoder.encode(change)
        batch.append((ino, msgspec.Raw(body)))
        batch_bytes += len(body)
        if len(batch) >= _FRAME_CHANGES or batch_bytes >= _FRAME_DATA_BYTES:
            yield _Changes(batch)
            batch, batch_bytes = [], 0
    if batch:
        yield _Changes(batch)
    yield total


def _names_apart(ino: int, names: dict[bytes, int]) -> Iterator[_Names]:
    part: dict[bytes, int] = {}
    for name, was in names.items():
        part[name] = was
        if len(part) >= _MAX_FRAME_NAMES:
            yield _Names(ino, part)
            part = {}
    if part:
        yield _Names(ino, part)


class Changes:
    """The changes of one epoch, looked up by inode number.

    Raises:
        UndoDamaged: from each method, when a change does not decode.
    """

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._changes: NumberTable = spill.numbers()
        self._names: dict[int, NameTable] = {}
        self._names_in_memory: set[int] = set()
        self._names_kept = 0
        self._last: tuple[int, SealedChange | None] = (-1, None)
        """Inode number and change of the last call: most are asked for twice in a row."""

    def get(self, ino: int) -> SealedChange | None:
        """Return the change of an inode, without names that lie apart (`names`); None without one."""
        if self._last[0] != ino:
            body = self._changes.get(ino)
            self._last = (ino, None if body is None else _decode(body))
        return self._last[1]

    def names(self, ino: int) -> Iterator[tuple[bytes, int]]:
        """Yield the touched names of a directory, in byte order, with their bindings when the epoch began."""
        change = self.get(ino)
        if change is not None and change.names_apart:
            yield from self._names[ino].items() if ino in self._names else ()
        elif change is not None:
            yield from sorted((change.names or _NO_NAMES).items())

    def is_touched(self, ino: int, name: bytes) -> bool:
        """Return whether the directory has this touched name."""
        change = self.get(ino)
        if change is not None and change.names_apart:
            return ino in self._names and name in self._names[ino]
        return change is not None and name in (change.names or _NO_NAMES)

    def items(self) -> Iterator[tuple[int, SealedChange]]:
        """Yield all changes with their inode numbers."""
        for ino, body in self._changes.items():
            yield ino, _decode(body)

    def take(self, frame: _Changes | _Names) -> None:
        """Take in a frame that was read."""
        if isinstance(frame, _Changes):
            for ino, raw in frame.changes:
                # Copied: the raw value would keep the whole frame in memory.
                self._changes.put(ino, bytes(raw))
        else:
            table = self._names.get(frame.ino)
            if table is None:
                table = self._names[frame.ino] = self._spill.names()
            for name, was in frame.names.items():
                table.put(name, was)
            self._names_in_memory.add(frame.ino)
            self._names_kept += len(frame.names)
            # Many directories, each of which would be small enough by itself.
            if self._names_kept >= self._spill.max_entries:
                for ino in self._names_in_memory:
                    self._names[ino].write_out()
                self._names_in_memory.clear()
                self._names_kept = 0


class Sealed(NamedTuple):
    """A sealed file that was read."""

    head: SealedHead
    changes: Changes
    totals: Totals


def read_head(path: str | bytes) -> SealedHead:
    """Read the head of a sealed file.

    Raises:
        FileNotFoundError: the epoch is not sealed, or not any more.
        UndoDamaged: the head does not decode.
    """
    with open(path, "rb") as file:
        try:
            return _read_head(file)
        except (msgspec.DecodeError, UndoDamaged) as error:
            raise UndoDamaged(f"{os.fsdecode(path)}: {error}") from error


def _read_head(file: BinaryIO) -> SealedHead:
    body = _next_frame(file)
    version = _version_decoder.decode(body).version
    if version != SEALED_VERSION:
        raise UndoDamaged(f"sealed file must have version {SEALED_VERSION}, got {version}")
    return _head_decoder.decode(body)


def read_sealed(path: str | bytes, spill: Spill) -> Sealed:
    """Read a sealed file into tables of ``spill``.

    Raises:
        FileNotFoundError: the epoch is not sealed, or not any more.
        UndoDamaged: the file does not decode, or was cut short.
    """
    with open(path, "rb") as file:
        try:
            head = _read_head(file)
            changes = Changes(spill)
            while True:
                frame = _frame_decoder.decode(_next_frame(file))
                if isinstance(frame, Totals):
                    return Sealed(head, changes, frame)
                changes.take(frame)
        except (msgspec.DecodeError, UndoDamaged) as error:
            raise UndoDamaged(f"{os.fsdecode(path)}: {error}") from error


def _next_frame(file: BinaryIO) -> bytes:
    size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    # A damaged length must not become an allocation.
    if not size or size > _MAX_FRAME_BYTES:
        raise UndoDamaged(f"a frame must have 1 to {_MAX_FRAME_BYTES} bytes, got {size}")
    body = file.read(size)
    if len(body) < size:
        raise UndoDamaged("the sealed file was cut short")
    return body


def _decode(body: bytes) -> SealedChange:
    try:
        return _change_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise UndoDamaged(f"sealed file: {error}") from error
