"""Record of damage that was found in a repository and not refuted since: the file `damage` beside the repository's own files.

`verify`, the scrub, `check` and `restore` write it; `status`, `doctor`, `list`, the metrics and the daemon's alerts read it. A place leaves the record when a complete read of everything finds no damage there any more, when all snapshots that
need it are proved whole, or when these are gone. Drills have records of their own (ciuic.protocol.last_drill).

Guarantees: the record is replaced atomically and durably, and two writers lose nothing of each other. It is no part of the repository:
a missing record is an empty one. One that cannot be read is damage itself, because what it said may still hold. The reader takes it
for hostile, as `ciuic.protocol.stored_remotely` does.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import msgspec

from ciuic.protocol.control_types import DamageStatus, rfc3339
from ciuic.protocol.stored_remotely import StoredRecordDamaged, read_state_file, write_state_file
from ciuic.structs import decode_json
from ciuic.types import MAX_TIME_NS
from ciuic.units import plural

NAME: Final = "damage"
KEY_DAMAGE: Final = "damage"
"""Key of the daemon's alert."""
DAMAGE_HINT: Final = (
    "ciuic verify --all --checksum names all of it; ciuic check --repair --read-data heals what it can"
)
_SHOWN: Final = 3
_VERSION: Final = 1
_MAX_BYTES: Final = 4 << 20
_MAX_PLACES: Final = 200
_REST: Final = "further places"
_MAX_TEXT: Final = 1000
_MAX_SNAPSHOTS: Final = 100
"""Snapshots that are named of a place."""
_MAX_REST_SNAPSHOTS: Final = 10_000

_Time = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_NS)]


class DamagedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A damaged file or directory of snapshots, or a damaged file of the repository itself."""

    where: str
    """Its path, in printable characters."""
    reason: str
    snapshots: tuple[str, ...] = ()
    """Snapshots that need it; empty where none does, or none is known."""
    by: str = ""
    """Command that found it."""
    found_ns: _Time = 0
    seen_ns: _Time = 0
    """Time at which it was found again, most recently."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    checksum: int
    """CRC-32 of ``places``, as they are encoded here."""
    places: msgspec.Raw


def read_damage(repository: Path) -> list[DamagedPlace]:
    """Return the places of a repository that are known to be damaged, the last found first.

    A place of which every snapshot was removed since is left out.
    """
    home = Path(os.path.realpath(repository))
    return [
        one
        for one in _read(home)
        if not one.snapshots or any(os.path.lexists(home / "snapshots" / id_) for id_ in one.snapshots)
    ]


def note_damage(
    repository: Path,
    found: Sequence[DamagedPlace],
    *,
    refuted: Callable[[DamagedPlace], bool] = lambda known: False,
) -> None:
    """Add what was found to the record, and take from it what was refuted; durable on return.

    Args:
        repository: Its directory.
        found: Damaged places; several of one path count as one.
        refuted: Returns whether a place that was known before is whole.

    Raises:
        OSError: The record cannot be written.
    """
    home = Path(os.path.realpath(repository))
    with _locked(home):
        before = _read(home)
        places: dict[str, DamagedPlace] = {}
        for one in [*found, *(known for known in before if not refuted(known))]:
            where = one.where[:_MAX_TEXT]
            newer = places.get(where, one)
            places[where] = msgspec.structs.replace(
                newer,
                where=where,
                reason=newer.reason[:_MAX_TEXT],
                snapshots=_united((newer, one), _MAX_SNAPSHOTS if where != _REST else _MAX_REST_SNAPSHOTS),
                found_ns=min(newer.found_ns, one.found_ns),
            )
        kept = _bounded(list(places.values()))
        if kept == before:
            return
        write_state_file(home.parent, home.name, NAME, encode_damage(kept))


def touched_snapshots(places: Sequence[DamagedPlace]) -> set[str]:
    """Return the ids of the snapshots that need one of these places."""
    return {id_ for place in places for id_ in place.snapshots}


def damage_status(places: Sequence[DamagedPlace]) -> DamageStatus | None:
    """Return the damage as the status has it; None for none."""
    if not places:
        return None
    newest = places[0]
    return DamageStatus(
        places=len(places),
        found=rfc3339(min(one.found_ns for one in places)),
        where=newest.where,
        reason=newest.reason,
        by=newest.by,
        snapshots=sorted(touched_snapshots(places)),
    )


def _united(places: Iterable[DamagedPlace], limit: int) -> tuple[str, ...]:
    """Return the snapshots of these places, as the plain text that a document can hold."""
    return tuple(islice(dict.fromkeys(str(id_) for one in places for id_ in one.snapshots), limit))


def _bounded(places: list[DamagedPlace]) -> list[DamagedPlace]:
    """Return the places, with those beyond the limit as one: no snapshot that they touch is forgotten."""
    if len(places) <= _MAX_PLACES:
        return places
    rest = places[_MAX_PLACES - 1 :]
    one = msgspec.structs.replace(
        rest[0], where=_REST, reason="see the command", snapshots=_united(rest, _MAX_REST_SNAPSHOTS)
    )
    return [*places[: _MAX_PLACES - 1], one]


def damage_words(damage: DamageStatus) -> str:
    """Return the sentence of status, alerts and doctor."""
    places = plural(damage.places, "damaged place")
    ids = damage.snapshots
    whose = f", in {', '.join(ids[:_SHOWN])}{', …' if len(ids) > _SHOWN else ''}" if ids else ""
    found = f"found last by ciuic {damage.by}" if damage.by else "found last"
    return f"the repository has {places}{whose}; {found}: {damage.where}: {damage.reason}"


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the lock of the record: the directory, because the file itself is replaced."""
    directory = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # NFS locks no directory (flock(2)): there the later of two writers may lose what the earlier one found.
        with suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def decode_damage(data: bytes) -> list[DamagedPlace]:
    """Return the places in ``data``. StoredRecordDamaged for anything else."""
    try:
        record = decode_json(data, _Record)
        if record.version != _VERSION:
            raise StoredRecordDamaged("another version of ciuic wrote it")
        if zlib.crc32(record.places) != record.checksum:
            raise StoredRecordDamaged("its checksum is wrong")
        return decode_json(bytes(record.places), list[DamagedPlace])
    except msgspec.DecodeError as error:
        raise StoredRecordDamaged(f"it is no record of damage: {error}") from error


def encode_damage(places: Sequence[DamagedPlace]) -> bytes:
    """Return the bytes that `decode_damage` reads as ``places``."""
    text = msgspec.json.encode(places)
    return msgspec.json.encode(_Record(version=_VERSION, checksum=zlib.crc32(text), places=msgspec.Raw(text)))


def _read(home: Path) -> list[DamagedPlace]:
    try:
        return decode_damage(read_state_file(home.parent, home.name, NAME, _MAX_BYTES))
    except FileNotFoundError:
        return []
    except (StoredRecordDamaged, OSError) as error:
        # No single snapshot refutes it; a complete read of everything writes the record anew.
        reason = f"the record of known damage cannot be read: {error}"
        return [DamagedPlace(where=str(home / NAME), reason=reason)]
