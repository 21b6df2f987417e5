"""Upkeep of a bucket with versions: put sound versions back, and renew the locks of what is needed.

Guarantees: only bytes that verified whole are stored again, under the name that they had; a name that was created meanwhile stays.
Logs are put back last, after what they refer to. Interrupted anywhere, the next run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, NamedTuple

from ciuic.maintenance.check_report import CheckFinding, CheckReport, Kind
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.names import KEYS_PREFIX
from ciuic.remote.objects.model import Objects
from ciuic.remote.objects.versions import NameVersions, ObjectVersions
from ciuic.remote.versions.sound_objects import SoundObjects
from ciuic.remote.versions.wanted import Standing, WantedName, wanted_names
from ciuic.units import plural

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
    for wanted in wanted_names(objects):
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


def _put_right(objects: SoundObjects, writer: Objects, wanted: WantedName) -> tuple[Standing, bool]:
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

    wanted = (one for one in wanted_names(objects) if one.standing in (Standing.RIGHT, Standing.LOST))
    with ThreadPoolExecutor(_LOCK_THREADS) as threads:
        while batch := list(islice(wanted, _LOCK_BATCH)):
            _drain(threads.map(lock, [one.found for one in batch]))
            locked += len(batch)
            astray += sum(one.standing is Standing.LOST for one in batch)
    return LockRenewal(locked, astray)


def _drain(results: Iterable[None]) -> None:
    for _ in results:
        pass
