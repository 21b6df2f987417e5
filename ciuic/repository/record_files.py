"""Small files beside the format: one record each, replaced as a whole, with a checksum.

A file is the record as JSON and, in a second line, the XXH3-64 of that JSON in hexadecimal. Guarantees: a
reader sees a whole record or none; a record with a flipped bit is none. The caller decides what a missing
record means.

References:
    XXH3: github.com/Cyan4973/xxHash, doc/xxhash_spec.md
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TypeVar

import msgspec

from ciuic.repository.config import MAX_FILE_BYTES
from ciuic.structs import decode_json
from ciuic.system.disk import Disk, read_regular

_Note = TypeVar("_Note", bound=msgspec.Struct)


def write_note(directory: str, name: str, note: msgspec.Struct, *, durable: bool) -> None:
    """Replace the record ``name``; make the directory if it is missing.

    With ``durable`` the record and its name survive a power cut after the return. Otherwise the file system's
    writeback decides, and a record torn by a power cut reads as none.

    Raises:
        OSError: the disk failed.
    """
    disk = Disk()
    with suppress(FileExistsError):
        disk.make_dir(directory)
        if durable:
            # The name of the new directory.
            disk.sync_dir(os.path.dirname(directory))
    # In a repository of another user the name may lead elsewhere: nothing that exists is opened.
    disk.replace_file(f"{directory}/{name}", encode_note(note), durable=durable)


def read_note(directory: str, name: str, kind: type[_Note]) -> _Note | None:
    """Return the record; None if it is missing or damaged."""
    try:
        return decode_note(read_regular(f"{directory}/{name}", MAX_FILE_BYTES), kind)
    except OSError:
        return None


def encode_note(note: msgspec.Struct) -> bytes:
    """Return the file of a record."""
    body = msgspec.json.encode(note)
    return b"%b\n%b\n" % (body, _checksum(body))


def decode_note(data: bytes, kind: type[_Note]) -> _Note | None:
    """Return the record in a file; None if it is damaged."""
    try:
        body, checksum, end = data.split(b"\n")
        if end or checksum != _checksum(body):
            return None
        return decode_json(body, kind)
    # The errors of msgspec and of UTF-8 decoding are ValueErrors.
    except (ValueError, RecursionError):
        return None


def _checksum(body: bytes) -> bytes:
    # Imported here because listing snapshots imports this module and must start quickly; it rarely has a note
    # to read.
    import xxhash

    return xxhash.xxh3_64_hexdigest(body).encode()
