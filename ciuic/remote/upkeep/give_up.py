"""Give up snapshots of a remote, of any host, by an entry of a log. A collection frees their space.

Guarantee: a snapshot counts as given up everywhere when `give_up_snapshots` has returned. The log says so for ever: a host
that still has it uploads it again only when told to (``ciuic remote upload --again``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from ciuic.errors import CiuicError, Damaged
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.log_entry import GivenUp
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.reading.remote_snapshots import CommittedEntry
from ciuic.remote.reading.space_reader import SpaceReader
from ciuic.remote.upkeep.collect import operator_log
from ciuic.repository.errors import UnsupportedFormat
from ciuic.types import SnapshotId

_ENTRIES_AT_ONCE: Final = 4096


def resolve_snapshots(
    opened: ReadableRemote, texts: Sequence[str], *, held: bool = False
) -> list[SnapshotId]:
    """Return the names of the snapshots that are meant, each once; full names are enough for those that cannot be read.

    Args:
        opened: The remote.
        texts: What the operator named.
        held: Allow snapshots that were held when they were uploaded.

    Raises:
        NotFound: no snapshot fits.
        UsageError: a text is ambiguous.
        CiuicError: a snapshot is held.
    """
    chosen = list(
        dict.fromkeys(
            SnapshotId(text) if text in opened.snapshots.entries else opened.snapshots.resolve(text)
            for text in texts
        )
    )
    refused = [] if held else [id_ for id_ in chosen if _is_held(opened, id_)]
    if refused:
        raise CiuicError(
            f"{', '.join(refused)} {'is' if len(refused) == 1 else 'are'} held; nothing was removed",
            hint="--held gives up held snapshots as well: a release after the upload is not known here",
        )
    return chosen


def _is_held(opened: ReadableRemote, id_: SnapshotId) -> bool:
    try:
        snapshot = opened.snapshots.load(id_)
    except (Damaged, UnsupportedFormat):
        return False
    return snapshot.held and snapshot.hold_uid is None


def give_up_snapshots(opened: ReadableRemote, ids: Sequence[SnapshotId], *, host: str) -> None:
    """Give up these snapshots, which `resolve_snapshots` returned; durable on return.

    Raises:
        DamagedRemote: an entry of a log cannot be read: another commit of the same content may be the one to keep.
        RolledBack: the remote is older than this host has seen it.
        RemoteUnreachable: the store did not answer for too long.
    """
    if opened.log_damage:
        raise DamagedRemote(
            opened.log_damage[0].name,
            f"{opened.log_damage[0].reason}; nothing was given up",
            hint="first: ciuic check --remote --repair",
        )
    by_space: dict[str, list[CommittedEntry]] = {}
    for id_ in ids:
        entry = opened.snapshots.entries[id_]
        by_space.setdefault(entry.manifests.url, []).append(entry)
    for reader in opened.readers:
        _remove(reader, by_space.get(reader.space.objects.url, []), host)


def _remove(reader: SpaceReader, entries: Sequence[CommittedEntry], host: str) -> None:
    if not entries:
        return
    log = operator_log(reader, host)
    reader.patience.of(log.hello)
    for start in range(0, len(entries), _ENTRIES_AT_ONCE):
        some = entries[start : start + _ENTRIES_AT_ONCE]
        manifests = [name for entry in some for name in (entry.live.manifest, *entry.also)]
        snapshots = [GivenUp(entry.live.repository, entry.live.snapshot) for entry in some]
        reader.patience.of(partial(log.remove, manifests, snapshots))
