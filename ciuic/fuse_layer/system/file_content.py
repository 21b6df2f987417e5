"""Copies of file content for the undo log, without knowledge of epochs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final

_COPY_BYTES: Final = 1 << 20


def data_ranges(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, end) that are not holes.

    A file system without SEEK_DATA calls everything data.
    """
    at = start
    while at < end:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            # No data behind this offset.
            if error.errno == errno.ENXIO:
                return
            raise
        if data >= end:
            return
        hole = os.lseek(fd, data, os.SEEK_HOLE)
        yield max(data, at), min(hole, end)
        at = hole


def copy_data(fd: int, out: int, start: int, end: int, on_copied: Callable[[int], None]) -> None:
    """Copy [start, end) to the same offsets of another file; holes stay holes.

    Args:
        fd: file to copy from.
        out: file to copy to.
        start: first byte.
        end: byte behind the last one.
        on_copied: called with the length of each piece that was copied.
    """
    for data_start, data_end in data_ranges(fd, start, end):
        at = data_start
        while at < data_end:
            piece = os.pread(fd, min(_COPY_BYTES, data_end - at), at)
            if not piece:
                break
            write_all(out, piece, at)
            at += len(piece)
            on_copied(len(piece))


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset, in as many calls as that takes."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def write_pieces(
    dir_fd: int, name: bytes, pieces: Iterable[bytes | memoryview], size_bytes: int, *, new: bool
) -> int:
    """Write pieces one behind the other into a file of at least ``size_bytes``, and return their total length.

    Args:
        dir_fd: directory of the file.
        name: name of the file.
        pieces: content.
        size_bytes: least length of the file; zeros follow the pieces.
        new: the file is made, and removed again after a failure; a file that lies there is an error.
    """
    made = os.O_CREAT | os.O_EXCL if new else 0
    out = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | made, 0o600, dir_fd=dir_fd)
    at = 0
    try:
        for piece in pieces:
            write_all(out, piece, at)
            at += len(piece)
        if os.fstat(out).st_size < size_bytes:
            # A reader finds zeros where there is no piece, instead of the end of the file.
            os.ftruncate(out, size_bytes)
    except OSError:
        if new:
            with suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
        raise
    finally:
        os.close(out)
    return at
