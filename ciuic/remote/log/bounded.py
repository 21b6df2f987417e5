"""Read and create small objects of the protocol, with limits on what a hostile bucket can make us allocate."""

from __future__ import annotations

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.document import MAX_DOCUMENT_BYTES
from ciuic.remote.format.log_entry import LogEntry, decode_log_entry, encode_log_entry
from ciuic.remote.format.names import RoundPart, log_entry_name, round_name
from ciuic.remote.format.round import StoredRound, decode_round, encode_round
from ciuic.remote.objects.model import Objects
from ciuic.remote.sealing.sealer import Sealer


def read_object(objects: Objects, name: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the whole object.

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it has more than ``max_bytes``.
    """
    # A range and not the whole: an attacker who can write to the bucket chooses the size.
    (data,) = objects.get_ranges(name, [(0, max_bytes + 1)])
    if len(data) > max_bytes:
        raise DamagedRemote(name, f"it has more than {max_bytes} bytes")
    return bytes(data)


def read_entry(objects: Objects, sealer: Sealer, writer: str, number: int) -> LogEntry:
    """Return an entry of a writer's log.

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it does not open.
    """
    data = read_object(objects, log_entry_name(writer, number))
    return decode_log_entry(sealer, writer, number, data)


def create_entry(objects: Objects, sealer: Sealer, writer: str, number: int, entry: LogEntry) -> bool:
    """Create an entry of a writer's log; False if another entry stands there, or this one after a lost reply."""
    return objects.create(log_entry_name(writer, number), encode_log_entry(sealer, writer, number, entry))


def read_round(objects: Objects, sealer: Sealer, round_: int, part: RoundPart) -> StoredRound:
    """Return an object of a round.

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it does not open.
    """
    data = read_object(objects, round_name(round_, part))
    return decode_round(sealer, round_, part, data)


def create_round(
    objects: Objects, sealer: Sealer, round_: int, part: RoundPart, content: StoredRound
) -> StoredRound:
    """Create an object of a round, unless one stands there; return the one that stands."""
    if objects.create(round_name(round_, part), encode_round(sealer, round_, part, content)):
        return content
    return read_round(objects, sealer, round_, part)
