"""Give up snapshots of a remote, of any host, by an entry of a log. A collection frees their space.

Guarantee: a snapshot counts as given up everywhere when `give_up_snapshots` has returned. A host that still has it may
upload it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ciuic.errors import CiuicError, Damaged
from ciuic.remote.format.log_entry import MAX_MANIFESTS
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.reading.space_reader import SpaceReader
from ciuic.remote.upkeep.collect import operator_log
from ciuic.repository.errors import UnsupportedFormat
from ciuic.types import SnapshotId


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
        RolledBack: the remote is older than this host has seen it.
        RemoteUnreachable: the store did not answer for too long.
    """
    by_space: dict[str, list[str]] = {}
    for id_ in ids:
        entry = opened.snapshots.entries[id_]
        by_space.setdefault(entry.manifests.url, []).append(entry.live.manifest)
    for reader in opened.readers:
        _remove(reader, by_space.get(reader.space.objects.url, []), host)


def _remove(reader: SpaceReader, manifests: Sequence[str], host: str) -> None:
    if not manifests:
        return
    log = operator_log(reader, host)
    reader.patience.of(log.hello)
    for start in range(0, len(manifests), MAX_MANIFESTS):
        reader.patience.of(partial(log.remove, manifests[start : start + MAX_MANIFESTS]))
