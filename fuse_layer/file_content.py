"""Content and attributes of files as the undo log copies them, in steps that know nothing of epochs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress


def data_ranges(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, end) that are not holes. A file system without SEEK_DATA calls everything data."""
    at = start
    while at < end:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        if data >= end:
            return
        hole = os.lseek(fd, data, os.SEEK_HOLE)
        yield max(data, at), min(hole, end)
        at = hole


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset, in as many calls as that takes."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def write_pieces(
    dir_fd: int, name: bytes, pieces: Iterable[bytes | memoryview], size_bytes: int, *, new: bool
) -> int:
    """Write pieces one behind the other into a file that is ``size_bytes`` long at least, and return what they add up to.

    ``new``: the file is made, and removed again after a failure; nothing that lies there is written to. OSError.
    """
    made = os.O_CREAT | os.O_EXCL if new else 0
    out = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | made, 0o600, dir_fd=dir_fd)
    at = 0
    try:
        for piece in pieces:
            write_all(out, piece, at)
            at += len(piece)
        if os.fstat(out).st_size < size_bytes:
            os.ftruncate(out, size_bytes)  # so that a reader finds zeros where there is no piece
    except OSError:
        if new:
            with suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
        raise
    finally:
        os.close(out)
    return at
