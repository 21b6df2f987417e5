"""Small files beside the format: one record each, replaced as a whole, with a checksum.

A file is the record as JSON and, in a second line, the XXH3-64 of that JSON in hexadecimal (github.com/Cyan4973/xxHash,
xxhash_spec.md). Guarantees: a reader sees a whole record or none; a record with a flipped bit is none. Leaves it to the caller what
a missing record means.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TypeVar

import msgspec

from ciuic.repository.config import read_file

_Note = TypeVar("_Note", bound=msgspec.Struct)


def write_note(directory: str, name: str, note: msgspec.Struct, *, durable: bool) -> None:
    """Replace the record ``name``; make the directory where it is missing. OSError.

    With ``durable`` the record and its name survive a power cut from the return on; otherwise the file system's writeback decides,
    and what a power cut tore is no record.
    """
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)
        if durable:
            _sync_directory(os.path.dirname(directory))
    temporary = f"{directory}/{name}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # of a process that was killed here
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    body = msgspec.json.encode(note)
    with os.fdopen(fd, "wb") as file:
        file.write(b"%b\n%b\n" % (body, _checksum(body)))
        file.flush()
        if durable:  # data first, then the name: after a crash the file is whole or as it was before
            os.fsync(file.fileno())
    os.rename(temporary, f"{directory}/{name}")
    if durable:
        _sync_directory(directory)


def read_note(directory: str, name: str, kind: type[_Note]) -> _Note | None:
    """Return the record; None where there is none or where it is damaged."""
    try:
        body, checksum, end = read_file(f"{directory}/{name}").split(b"\n")
        if end or checksum != _checksum(body):
            return None
        return msgspec.json.decode(body, type=kind)
    except (OSError, ValueError, RecursionError):  # msgspec's and Unicode's errors are ValueErrors
        return None


def _checksum(body: bytes) -> bytes:
    import xxhash  # listing snapshots comes here, and must start quickly: it has no note to read as a rule

    return xxhash.xxh3_64_hexdigest(body).encode()


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
