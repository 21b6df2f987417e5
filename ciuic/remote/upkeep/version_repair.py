"""Upkeep of a bucket with versions: find the names that should be there, put sound versions back, and renew the locks of what is needed.

A name should be there if ciuic stored it and the protocol itself neither deleted nor replaced it. Deletions of the protocol
leave a proof that only the key makes: packs and manifests in the ``.final`` of a round, entries of a log before one that sums
them up. Anything else that is missing was deleted.

Guarantees: only bytes that verified whole are stored again, under the name that they had; a name that was created meanwhile stays.
Logs are put back last, after what they refer to. Interrupted anywhere, the next run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import groupby, islice
from typing import Final, NamedTuple

from ciuic.maintenance.check import CheckFinding, CheckReport, Kind
from ciuic.remote.documents import LogRetired, LogState, decode_log_entry, decode_round
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.object_names import (
    KEYS_PREFIX,
    REMOTE_JSON,
    PackRef,
    pack_name,
    parse_log_entry,
    parse_manifest,
    parse_pack,
    parse_round,
    parse_slot,
)
from ciuic.remote.objects.model import NameVersions, Objects, ObjectVersions
from ciuic.remote.reading.versions import SoundObjects, log_of, split_space
from ciuic.remote.sealing.key_slots import MAX_SLOT_BYTES
from ciuic.units import plural


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


class _WantedName(NamedTuple):
    """Name that should be there, or should not (`Standing.FORGED`)."""

    found: NameVersions
    standing: Standing
    kind: str
    """``pack``, ``manifest``, ``log entry``, ``round``, ``key slot`` or ``remote.json``."""


def _wanted_names(objects: SoundObjects) -> Iterator[_WantedName]:
    """Yield every name that should be there, and those that are forged; the logs last.

    Memory grows with the packs that rounds deleted and with the longest log. Of names with several versions the table
    of a pack is read, and anything else whole.
    """
    condemned: set[str] = set()
    for (space, writer), several in groupby(objects.all_versions(), key=log_of):
        if writer:
            wanted: Iterable[_WantedName | None] = _of_log(objects, space, list(several))
        else:
            wanted = (_of_name(objects, space, found, condemned) for found in several)
        for one in wanted:
            # What was made up and deleted again misleads no reader.
            if one is not None and (one.standing is not Standing.FORGED or one.found.current):
                yield one


def _of_name(
    objects: SoundObjects, space: str, found: NameVersions, condemned: set[str]
) -> _WantedName | None:
    name = found.name[len(space) :]
    if round_ := parse_round(name):
        standing = _standing(objects, found)
        if standing is Standing.GONE:
            # A round is never deleted, so what no version of is sound was never one.
            return _WantedName(found, Standing.FORGED, "round")
        if round_.part == "final":
            data = objects.sound_version(found)[1]
            content = decode_round(objects.sealer_of(found.name), round_.round, round_.part, data)
            condemned.update(f"{space}{pack_name(PackRef(ref))}" for ref in content.condemned)
            condemned.update(f"{space}{manifest}" for manifest in content.manifests)
        return _WantedName(found, standing, "round")
    if parse_slot(name):
        return _of_slot(objects, found)
    if name == REMOTE_JSON:
        standing = _standing(objects, found)
        # Anybody can make up the space of a repository.
        forged = space and standing is Standing.GONE
        return _WantedName(found, Standing.FORGED if forged else standing, "remote.json")
    kind = "pack" if parse_pack(name) else "manifest" if parse_manifest(name) else ""
    if not kind or found.name in condemned:
        return None
    standing = _standing(objects, found)
    # A name that was made up says nothing to anybody.
    return None if standing is Standing.GONE and found.current is None else _WantedName(found, standing, kind)


def _of_slot(objects: SoundObjects, found: NameVersions) -> _WantedName | None:
    """Return the standing of a key slot, of which no seal tells whether its owner removed or replaced it.

    The slot that opened the remote is wanted as it was. Any other is left alone: putting back one that was removed would let
    in the user whose slot was removed. One that is not well-formed opens nothing.
    """
    current = found.current
    data = b"" if current is None else bytes(objects.versions.read(current, 0, MAX_SLOT_BYTES + 1))
    name, content = objects.slot
    if found.name == name:
        return _WantedName(found, Standing.RIGHT if data == content else Standing.LOST, "key slot")
    if current is None:
        return None
    flawed = objects.flaw_of(found.name, data)
    return _WantedName(found, Standing.FORGED if flawed else Standing.RIGHT, "key slot")


def _of_log(objects: SoundObjects, space: str, entries: list[NameVersions]) -> Iterator[_WantedName]:
    """Yield the entries of a log from the last that sums up those before it, and forged ones at its end."""
    chosen: list[_WantedName] = []
    is_end = True
    for found in reversed(entries):
        try:
            data = objects.sound_version(found)[1]
        except DamagedRemote:
            standing = Standing.FORGED if is_end else Standing.GONE
            chosen.append(_WantedName(found, standing, "log entry"))
            continue
        is_end = False
        chosen.append(_WantedName(found, _standing(objects, found), "log entry"))
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


_KINDS: Final[dict[str, Kind]] = {
    "pack": "pack",
    "manifest": "snapshot",
    "log entry": "log",
    "round": "round",
    "key slot": "key slot",
    "remote.json": "configuration",
}
_WHAT: Final[dict[Standing, str]] = {
    Standing.LOST: "deleted or overwritten; a version is sound",
    Standing.GONE: "damaged in all versions that are left",
    Standing.FORGED: "stored by a user without the key",
}
_HINTS: Final[dict[Standing, str]] = {
    Standing.LOST: "ciuic check --repair with the same options stores the sound versions again",
    Standing.GONE: "ciuic check --remote --repair, on a host whose repository has it",
    Standing.FORGED: "ciuic check --repair with the same options deletes them",
}
_LOCK_THREADS: Final = 8
_LOCK_BATCH: Final = 1000


class LockRenewal(NamedTuple):
    """Result of `renew_locks`."""

    locked: int
    """Objects whose version is locked until the time that was asked for, or longer."""
    astray: int
    """Objects among them that were deleted or overwritten: only ``--behind-deletions`` sees them."""


def check_versions(
    objects: SoundObjects, writer: Objects | None, progress: Callable[[str], None] = lambda name: None
) -> CheckReport:
    """Find what was deleted, overwritten or forged in the bucket; put it right where a writer is given.

    Args:
        objects: The remote behind deletions.
        writer: The same remote, to be written to; None to only look.
        progress: Called with each name.

    Raises:
        RemoteUnreachable: the store did not answer.
        RemoteRefused: these credentials may not write.
    """
    report = CheckReport()
    groups: dict[tuple[str, Standing, bool], list[str]] = {}
    counts: dict[tuple[str, Standing, bool], int] = {}
    for wanted in _wanted_names(objects):
        progress(wanted.found.name)
        if wanted.kind == "pack":
            report.packs += 1
            report.stored_bytes += wanted.found.versions[0].size_bytes
        elif wanted.kind == "manifest":
            report.snapshots += 1
        if wanted.standing is Standing.RIGHT:
            continue
        standing, done = (wanted.standing, False) if writer is None else _put_right(objects, writer, wanted)
        key = (wanted.kind, standing, done)
        counts[key] = counts.get(key, 0) + 1
        # An attacker may have made up millions: a few names are shown.
        if len(groups.setdefault(key, [])) < 3:
            groups[key].append(wanted.found.name)
    for (kind, standing, done), names in groups.items():
        report.findings.append(_finding(kind, standing, done, names, counts[kind, standing, done]))
    return report


def _put_right(objects: SoundObjects, writer: Objects, wanted: _WantedName) -> tuple[Standing, bool]:
    """Store the sound version again, or delete what is forged; return what it is, and whether it is right now."""
    found = wanted.found
    if wanted.standing is Standing.FORGED:
        writer.delete([found.name])
        return wanted.standing, True
    if wanted.standing is Standing.GONE:
        return wanted.standing, False
    try:
        # Of a pack only the table was read until now.
        slot, content = objects.slot
        data = content if found.name == slot else objects.sound_version(found)[1]
    except DamagedRemote:
        return Standing.GONE, False
    if found.current is None:
        # Another process may be storing it at this moment: create-only leaves that alone.
        return wanted.standing, writer.create(found.name, data) or writer.get(found.name) == data
    writer.put(found.name, [data])
    return wanted.standing, True


def _finding(kind: str, standing: Standing, done: bool, names: list[str], count: int) -> CheckFinding:
    shown = ", ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")
    what = plural(count, kind, "log entries" if kind == "log entry" else "")
    message = f"{what} {_WHAT[standing]}: {shown}"
    if standing is Standing.GONE and kind in ("pack", "manifest"):
        # Anybody may have made it up: what a snapshot needs is known to those who read the snapshots.
        hint = "ciuic verify --all with the same options says whether a snapshot needs it"
        return CheckFinding("warning", _KINDS[kind], message, hint)
    return CheckFinding("error", _KINDS[kind], message, "" if done else _HINTS[standing], repaired=done)


def renew_locks(
    objects: SoundObjects,
    versions: ObjectVersions,
    until_ns: int,
    progress: Callable[[str], None] = lambda name: None,
) -> LockRenewal:
    """Have the store keep everything that is needed until this time; a request for each object.

    Args:
        objects: The remote behind deletions.
        versions: Its versions.
        until_ns: Time in ns since 1970; locks that last longer stay.
        progress: Called with each name.

    Raises:
        RemoteUnreachable: the store did not answer.
        RemoteRefused: the bucket has no locks, or these credentials may not set them.
    """
    locked = astray = 0

    def lock(found: NameVersions) -> None:
        progress(found.name)
        # Of key slots only the current version is known to be of use.
        current = found.current
        if current is None or not found.name.startswith(KEYS_PREFIX):
            sound = objects.choose(found.name)
            # Of two with one content the later one stays: it was put back, or moved to another storage class.
            same = current is not None and (current.digest, current.size_bytes) == (
                sound.digest,
                sound.size_bytes,
            )
            current = current if same else sound
        assert current is not None
        versions.lock(current, until_ns)

    wanted = (one for one in _wanted_names(objects) if one.standing in (Standing.RIGHT, Standing.LOST))
    with ThreadPoolExecutor(_LOCK_THREADS) as threads:
        while batch := list(islice(wanted, _LOCK_BATCH)):
            locked += sum(1 for _ in threads.map(lock, [one.found for one in batch]))
            astray += sum(one.standing is Standing.LOST for one in batch)
    return LockRenewal(locked, astray)
