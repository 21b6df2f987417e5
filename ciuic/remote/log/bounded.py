"""Read and create small objects of the protocol, with limits on what a hostile bucket can make us allocate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.document import MAX_DOCUMENT_BYTES
from ciuic.remote.format.log_entry import LogEntry, decode_log_entry, encode_log_entry
from ciuic.remote.format.names import RoundPart, log_entry_name, round_name
from ciuic.remote.format.round import StoredRound, decode_round, encode_round
from ciuic.remote.objects.model import Objects
from ciuic.remote.objects.verified import read_verified
from ciuic.remote.sealing.sealer import Sealer

_PAGES: Final = (b"<!doctype html", b"<html")
_Document = TypeVar("_Document")


def read_object(objects: Objects, name: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the whole object.

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it has more than ``max_bytes``, or is a web page.
    """
    # A range and not the whole: an attacker who can write to the bucket chooses the size.
    (data,) = objects.get_ranges(name, [(0, max_bytes + 1)])
    if len(data) > max_bytes:
        raise DamagedRemote(name, f"it has more than {max_bytes} bytes")
    content = bytes(data)
    if content[:64].lstrip().lower().startswith(_PAGES):
        raise DamagedRemote(name, "it is a web page; a proxy may have answered in place of the store")
    return content


def read_document(
    objects: Objects, name: str, decode: Callable[[bytes], _Document], max_bytes: int = MAX_DOCUMENT_BYTES
) -> _Document:
    """Return what ``decode`` makes of the whole object, which is read again where that fails (`read_verified`).

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it has more than ``max_bytes``, or ``decode`` raises it.
    """
    return read_verified(objects, lambda: decode(read_object(objects, name, max_bytes)))


def read_entry(objects: Objects, sealer: Sealer, writer: str, number: int) -> LogEntry:
    """Return an entry of a writer's log.

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it does not open.
    """
    return read_document(
        objects, log_entry_name(writer, number), lambda data: decode_log_entry(sealer, writer, number, data)
    )


def create_entry(objects: Objects, sealer: Sealer, writer: str, number: int, entry: LogEntry) -> bool:
    """Create an entry of a writer's log; False if another entry stands there, or this one after a lost reply."""
    return objects.create(log_entry_name(writer, number), encode_log_entry(sealer, writer, number, entry))


def read_round(objects: Objects, sealer: Sealer, round_: int, part: RoundPart) -> StoredRound:
    """Return an object of a round.

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it does not open.
    """
    return read_document(
        objects, round_name(round_, part), lambda data: decode_round(sealer, round_, part, data)
    )


def create_round(
    objects: Objects, sealer: Sealer, round_: int, part: RoundPart, content: StoredRound
) -> StoredRound:
    """Create an object of a round, unless one stands there; return the one that stands."""
    if objects.create(round_name(round_, part), encode_round(sealer, round_, part, content)):
        return content
    return read_round(objects, sealer, round_, part)
