"""Mend rounds of collections that cannot be read, as far as that is safe.

Nothing is deleted by a round before its ``.final`` stands, and whichever ``.final`` stands is valid. A round of which only the
beginning is there, and cannot be read, is therefore ended with an empty one: a collector that still works on it deletes
nothing. Objects of rounds are never deleted, and rounds have no gaps: an unreadable one behind a gap, or
a part without the parts that are created before it, was planted, and is deleted.

A ``.final`` that cannot be read beside a readable beginning stays damage: what it deleted is not known.

References:
    docs/remote-format.md, section 8
"""

from __future__ import annotations

from typing import Final

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.names import (
    MAX_NUMBER,
    ROUNDS_PREFIX,
    RoundPart,
    new_hex_id,
    parse_round,
    round_name,
)
from ciuic.remote.format.round import StoredRound
from ciuic.remote.log.bounded import create_round, read_round
from ciuic.remote.objects.model import NoSuchObject
from ciuic.remote.reading.space_reader import SpaceReader
from ciuic.repository.errors import UnsupportedFormat

_IN_ORDER: Final[tuple[RoundPart, ...]] = ("begun", "final", "done")


def repair_rounds(reader: SpaceReader) -> None:
    """Delete planted objects of rounds, and end a round that cannot be read; durable on return.

    Raises:
        RemoteUnreachable: the store did not answer for too long.
        RemoteRefused: these credentials may not write, or not delete.
    """
    reader.patience.of(lambda: _repair(reader))


def _repair(reader: SpaceReader) -> None:
    objects = reader.space.objects
    parts: dict[int, set[RoundPart]] = {}
    for info in objects.list(ROUNDS_PREFIX):
        if name := parse_round(info.name):
            parts.setdefault(name.round, set()).add(name.part)
    # A round begins only after the one before has ended.
    end = 0
    while "done" in parts.get(end, ()) and _begins(parts[end]):
        end += 1
    planted = [
        round_name(round_, part)
        for round_, found in parts.items()
        for at, part in enumerate(_IN_ORDER)
        if part in found
        and (round_ > end or not found.issuperset(_IN_ORDER[:at]))
        and not _is_readable(reader, round_, part)
    ]
    objects.delete(planted)
    if parts.get(end) == {"begun"} and end < MAX_NUMBER and not _is_readable(reader, end, "begun"):
        empty = StoredRound(nonce=new_hex_id())
        # Another collector's may stand meanwhile: then it deletes, and says when it has done so.
        if create_round(objects, reader.space.sealer, end, "final", empty).nonce == empty.nonce:
            create_round(objects, reader.space.sealer, end, "done", StoredRound(nonce=new_hex_id()))


def _begins(found: set[RoundPart]) -> bool:
    return found.issuperset(_IN_ORDER)


def _is_readable(reader: SpaceReader, round_: int, part: RoundPart) -> bool:
    try:
        read_round(reader.space.objects, reader.space.sealer, round_, part)
    except (DamagedRemote, NoSuchObject):
        return False
    except UnsupportedFormat:
        # Perhaps of a later version of ciuic, which can judge it.
        return True
    return True
