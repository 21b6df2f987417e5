"""Names of a remote that should be there: all that ciuic stored, but what the protocol itself deleted or replaced.

Deletions of the protocol leave a proof that only the key makes: packs and manifests in the ``.final`` of a round, entries of a log
before one that sums them up. Anything else that is missing was deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.log_entry import LogRetired, LogState, decode_log_entry
from ciuic.remote.format.names import (
    REMOTE_JSON,
    PackRef,
    pack_name,
    parse_log_entry,
    parse_manifest,
    parse_pack,
    parse_round,
    parse_slot,
)
from ciuic.remote.format.round import decode_round
from ciuic.remote.objects.versions import NameVersions
from ciuic.remote.sealing.key_slot import MAX_SLOT_BYTES
from ciuic.remote.versions.sound_objects import SoundObjects, log_of
from ciuic.remote.versions.verification import split_space


class Standing(Enum):
    """State of a name in the bucket."""

    RIGHT = "right"
    """Its current version is the sound one, or the only one."""
    LOST = "lost"
    """It was deleted or overwritten, and a version is sound."""
    GONE = "gone"
    """No version that is left is sound."""
    FORGED = "forged"
    """It was stored without the key, and stands where readers look for what there is."""


class WantedName(NamedTuple):
    """Name that should be there, or should not (`Standing.FORGED`)."""

    found: NameVersions
    standing: Standing
    kind: str
    """``pack``, ``manifest``, ``log entry``, ``round``, ``key slot`` or ``remote.json``."""


def wanted_names(objects: SoundObjects) -> Iterator[WantedName]:
    """Yield every name that should be there, and those that are forged; the logs last.

    Memory grows with the packs that rounds deleted and with the longest log. Of names with several versions the table
    of a pack is read, and anything else whole.
    """
    condemned: set[str] = set()
    for (space, writer), several in groupby(objects.all_versions(), key=log_of):
        if writer:
            wanted: Iterable[WantedName | None] = _of_log(objects, space, list(several))
        else:
            wanted = (_of_name(objects, space, found, condemned) for found in several)
        for one in wanted:
            # What was made up and deleted again misleads no reader.
            if one is not None and (one.standing is not Standing.FORGED or one.found.current):
                yield one


def _of_name(
    objects: SoundObjects, space: str, found: NameVersions, condemned: set[str]
) -> WantedName | None:
    name = found.name[len(space) :]
    if round_ := parse_round(name):
        standing = _standing(objects, found)
        if standing is Standing.GONE:
            # A round is never deleted, so what no version of is sound was never one.
            return WantedName(found, Standing.FORGED, "round")
        if round_.part == "final":
            data = objects.sound_version(found)[1]
            content = decode_round(objects.sealer_of(found.name), round_.round, round_.part, data)
            condemned.update(f"{space}{pack_name(PackRef(ref))}" for ref in content.condemned)
            condemned.update(f"{space}{manifest}" for manifest in content.manifests)
        return WantedName(found, standing, "round")
    if parse_slot(name):
        return _of_slot(objects, found)
    if name == REMOTE_JSON:
        standing = _standing(objects, found)
        # Anybody can make up the space of a repository.
        forged = space and standing is Standing.GONE
        return WantedName(found, Standing.FORGED if forged else standing, "remote.json")
    kind = "pack" if parse_pack(name) else "manifest" if parse_manifest(name) else ""
    if not kind or found.name in condemned:
        return None
    standing = _standing(objects, found)
    # A name that was made up says nothing to anybody.
    return None if standing is Standing.GONE and found.current is None else WantedName(found, standing, kind)


def _of_slot(objects: SoundObjects, found: NameVersions) -> WantedName | None:
    """Return the standing of a key slot, of which no seal tells whether its owner removed or replaced it.

    The slot that opened the remote is wanted as it was. Any other is left alone: putting back one that was removed would let
    in the user whose slot was removed. One that is not well-formed opens nothing.
    """
    current = found.current
    data = b"" if current is None else bytes(objects.versions.read(current, 0, MAX_SLOT_BYTES + 1))
    name, content = objects.slot
    if found.name == name:
        return WantedName(found, Standing.RIGHT if data == content else Standing.LOST, "key slot")
    if current is None:
        return None
    flawed = objects.flaw_of(found.name, data)
    return WantedName(found, Standing.FORGED if flawed else Standing.RIGHT, "key slot")


def _of_log(objects: SoundObjects, space: str, entries: list[NameVersions]) -> Iterator[WantedName]:
    """Yield the entries of a log from the last that sums up those before it, and forged ones at its end."""
    chosen: list[WantedName] = []
    is_end = True
    for found in reversed(entries):
        try:
            data = objects.sound_version(found)[1]
        except DamagedRemote:
            standing = Standing.FORGED if is_end else Standing.GONE
            chosen.append(WantedName(found, standing, "log entry"))
            continue
        is_end = False
        chosen.append(WantedName(found, _standing(objects, found), "log entry"))
        position = parse_log_entry(found.name[len(space) :])
        assert position is not None
        entry = decode_log_entry(objects.sealer_of(found.name), position.writer, position.number, data)
        if isinstance(entry, LogState | LogRetired):
            break
    yield from reversed(chosen)


def _standing(objects: SoundObjects, found: NameVersions) -> Standing:
    is_pack = parse_pack(split_space(found.name, b"")[1]) is not None
    try:
        if is_pack and len(found.versions) == 1 and found.current is not None:
            # Left to `verify`: it would be read for nothing but this.
            return Standing.RIGHT
        sound = objects.choose(found.name) if is_pack else objects.sound_version(found)[0]
    except DamagedRemote:
        return Standing.GONE
    current = found.current
    same = current is not None and (current.digest, current.size_bytes) == (sound.digest, sound.size_bytes)
    return Standing.RIGHT if same else Standing.LOST
