"""Free the space of a remote that no snapshot needs, and give up snapshots so that their space becomes free.

Both work in the remote itself and in the space of each repository in it, through the operator's own log.

Guarantees: those of `Collector`. Interrupted at any request, the next collection of any host goes on. A snapshot counts
as given up everywhere when `give_up_snapshots` has returned. The log says so for ever: a host that still has it uploads
it again only when told to (``ciuic remote upload --again``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Final, NamedTuple

from ciuic.errors import CiuicError, Damaged
from ciuic.remote.documents import GivenUp
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.host_status import expired_statuses
from ciuic.remote.log_reader import LogReader, Rounds
from ciuic.remote.object_names import STATUS_PREFIX, PackRef
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.reading.remote_repository import SpaceReader
from ciuic.remote.reading.remote_snapshots import CommittedEntry
from ciuic.remote.remote_index import RemoteIndex, cold_packs
from ciuic.remote.sets import remove_old_sets
from ciuic.remote.upkeep.brake import Brake, HeldRepository
from ciuic.remote.upkeep.collection_round import (
    DEFAULT_POLICY,
    CollectionPolicy,
    CollectionResult,
    Collector,
    live_chunks,
)
from ciuic.remote.writer_log import WriterLog, WriterState
from ciuic.repository import log as events
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.snapshot_sets import named_set, parse_set_name
from ciuic.types import SnapshotId

# A round that deletes nothing may be one of another collector, or all that it condemned is needed again.
_MAX_EMPTY_ROUNDS = 2


class CollectedSpace(NamedTuple):
    """Result or plan of a collection in one space."""

    id: str
    """Id of the remote, or of the repository whose space it is."""
    packs: tuple[PackRef, ...]
    """Packs that were deleted, or would be."""
    manifests: tuple[str, ...]
    """Manifests of the same."""
    freed_bytes: int
    """Size of these packs."""
    repacked_bytes: int
    """Bytes that were, or would be, copied from mostly dead packs to new ones."""
    rescued: int
    """Packs that turned out to be needed after they were chosen."""
    unreadable: tuple[PackRef, ...]
    """Packs whose tables cannot be read; they stay."""
    cold: tuple[PackRef, ...]
    """Those of the packs that had become cold, for which the store may charge on."""
    decayed: tuple[PackRef, ...]
    """Packs in which a needed chunk could not be read; what else has it stays."""
    checked_bytes: int
    """Stored bytes of copies that were read because others were deleted."""
    held: tuple[HeldRepository, ...]
    """Repositories of which most was given up at once: it stays until a person approves."""
    approved: tuple[str, ...]
    """Those of the approvals by which something may go."""
    unfinished: bool
    """Result of a dry run: a round is under way, which the next collection ends first."""


def collect_remote(
    opened: ReadableRemote,
    *,
    host: str,
    policy: CollectionPolicy = DEFAULT_POLICY,
    approved: Collection[str] = (),
    between: Callable[[], None] = lambda: None,
    collected: Callable[[CollectedSpace], None] = lambda space: None,
) -> list[CollectedSpace]:
    """Delete what no snapshot needs; durable on return. A space that is damaged keeps no other from being collected.

    Args:
        opened: The remote.
        host: Name of this host, for people.
        policy: What is worth collecting.
        approved: Ids of repositories and labels of hosts of which everything that was given up may go (`Brake`).
        between: Called often.
        collected: Called with each result, also where the end is an error.

    Raises:
        Damaged: a log, a round, a manifest or a tree cannot be read; nothing was deleted in its space, all others are collected.
        RolledBack: the remote is older than this host has seen it.
        RemoteUnreachable: the store did not answer for too long.
        RemoteRefused: these credentials may not delete.
    """
    spaces = _in_each_space(
        opened, lambda reader: _collect(reader, host, policy, approved, between), collected
    )
    objects = opened.remote.objects
    objects.delete(expired_statuses(objects.list(STATUS_PREFIX)))
    # Hosts that may not delete leave theirs.
    remove_old_sets(objects)
    return spaces


def preview_collection(
    opened: ReadableRemote,
    *,
    now_ns: int,
    policy: CollectionPolicy = DEFAULT_POLICY,
    approved: Collection[str] = (),
    between: Callable[[], None] = lambda: None,
    collected: Callable[[CollectedSpace], None] = lambda space: None,
) -> list[CollectedSpace]:
    """Return what `collect_remote` would delete at this time; only reads.

    Raises:
        Damaged, RemoteUnreachable: as `collect_remote`.
    """
    return _in_each_space(
        opened, lambda reader: _preview(reader, now_ns, policy, approved, between), collected
    )


def _in_each_space(
    opened: ReadableRemote,
    collect: Callable[[SpaceReader], CollectedSpace],
    collected: Callable[[CollectedSpace], None],
) -> list[CollectedSpace]:
    spaces: list[CollectedSpace] = []
    refused: Damaged | None = None
    for reader in opened.readers:
        try:
            spaces.append(collect(reader))
        except Damaged as error:
            # Nothing of another space is needed by this one's snapshots.
            events.warning("remote_space_not_collected", space=reader.space.objects.url, error=error.message)
            refused = refused or error
        else:
            collected(spaces[-1])
    if refused is not None:
        raise refused
    return spaces


def operator_log(reader: SpaceReader, host: str, index: RemoteIndex | None = None) -> WriterLog:
    """Return this host's log for operators in a space, not begun yet.

    Its name is kept in the cache. Without the cache another log is begun, which is always allowed.

    Args:
        reader: Reader of the space.
        host: Name of this host, for people.
        index: Index that follows the log's rounds; None for a caller that stores nothing.
    """
    space = reader.space
    rounds = Rounds(space.objects, space.sealer, known=None if index is None else index.rounds_finished)
    return WriterLog(
        space.objects,
        space.sealer,
        WriterState(str(reader.cache.path / "operator")),
        rounds,
        host=host,
        # Of no repository: an operator may speak for all of them.
        repository=space.id,
    )


@contextmanager
def open_collector(
    reader: SpaceReader,
    *,
    host: str,
    policy: CollectionPolicy = DEFAULT_POLICY,
    brake: Brake | None = None,
    between: Callable[[], None] = lambda: None,
    fresh: bool = False,
) -> Iterator[Collector]:
    """Provide a collector of a space, with an index of its own in the cache, or a ``fresh`` one; by default it has this host's brake."""
    space = reader.space
    policy = policy._replace(cold=cold_packs(space.objects))
    with nullcontext() if fresh else reader.cache.index_path() as path:
        index = RemoteIndex.open(path)
        try:
            yield Collector(
                space.objects,
                space.sealer,
                log=operator_log(reader, host, index),
                reader=LogReader(
                    space.objects, space.sealer, cache_path=str(reader.cache.path / "operator.logs")
                ),
                index=index,
                mark=live_chunks(reader, between=between),
                brake=brake or _brake(reader),
                policy=policy,
            )
        finally:
            index.close()


def _brake(reader: SpaceReader, approved: Collection[str] = (), *, is_preview: bool = False) -> Brake:
    return Brake(reader.cache.path / "levels", approved=approved, is_preview=is_preview)


def _collect(
    reader: SpaceReader,
    host: str,
    policy: CollectionPolicy,
    approved: Collection[str],
    between: Callable[[], None],
) -> CollectedSpace:
    brake = _brake(reader, approved)
    cold = cold_packs(reader.space.objects)
    results: list[CollectionResult] = []
    with open_collector(reader, host=host, policy=policy, brake=brake, between=between) as collector:
        empty = 0
        while empty < _MAX_EMPTY_ROUNDS:
            result = reader.retry.call(collector.run)
            results.append(result)
            if result.round < 0:
                break
            empty += not (result.packs or result.manifests)
    brake.note()
    packs = tuple(ref for result in results for ref in result.packs)
    return CollectedSpace(
        reader.space.id,
        packs,
        tuple(name for result in results for name in result.manifests),
        sum(result.freed_bytes for result in results),
        sum(result.repacked_bytes for result in results),
        sum(result.rescued for result in results),
        results[-1].unreadable,
        tuple(ref for ref in packs if ref in cold),
        tuple(sorted(set().union(*(result.decayed for result in results)))),
        sum(result.checked_bytes for result in results),
        brake.held,
        tuple(sorted(brake.met)),
        False,
    )


def _preview(
    reader: SpaceReader,
    now_ns: int,
    policy: CollectionPolicy,
    approved: Collection[str],
    between: Callable[[], None],
) -> CollectedSpace:
    brake = _brake(reader, approved, is_preview=True)
    with open_collector(reader, host="", policy=policy, brake=brake, between=between) as collector:
        found = collector.preview(now_ns)
    cold = cold_packs(reader.space.objects)
    sizes = {pack.ref: pack.size_bytes for pack in reader.lookup.packs().values()}
    return CollectedSpace(
        reader.space.id,
        found.packs,
        found.manifests,
        sum(sizes.get(ref, 0) for ref in found.packs),
        found.repacked_bytes,
        0,
        found.unreadable,
        tuple(ref for ref in found.packs if ref in cold),
        (),
        0,
        brake.held,
        tuple(sorted(brake.met)),
        found.unfinished,
    )


_ENTRIES_AT_ONCE: Final = 4096


def resolve_snapshots(
    opened: ReadableRemote, texts: Sequence[str], *, held: bool = False
) -> list[SnapshotId]:
    """Return the names of the snapshots that are meant, each once; full names are enough for those that cannot be read.

    Args:
        opened: The remote.
        texts: What the operator named; a set (``set:NAME``) means all its members.
        held: Allow snapshots that were held when they were uploaded.

    Raises:
        NotFound: no snapshot fits.
        UsageError: a text is ambiguous.
        CiuicError: a snapshot is held.
    """
    chosen = list(dict.fromkeys(id_ for text in texts for id_ in _named(opened, text)))
    refused = [] if held else [id_ for id_ in chosen if _is_held(opened, id_)]
    if refused:
        raise CiuicError(
            f"{', '.join(refused)} {'is' if len(refused) == 1 else 'are'} held; nothing was removed",
            hint="--held gives up held snapshots as well: a release after the upload is not known here",
        )
    return chosen


def _named(opened: ReadableRemote, text: str) -> list[SnapshotId]:
    """Return the snapshot that a text names, or all of a set."""
    if text in opened.snapshots.entries:
        return [SnapshotId(text)]
    named = parse_set_name(text)
    if named is None or named.member:
        return [opened.snapshots.resolve(text)]
    return [one.id for one in named_set(named.name, opened.snapshots.sets()).found.values()]


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
    log, brake = operator_log(reader, host), _brake(reader)
    reader.retry.call(log.hello)
    for start in range(0, len(entries), _ENTRIES_AT_ONCE):
        some = entries[start : start + _ENTRIES_AT_ONCE]
        manifests = [name for entry in some for name in (entry.live.manifest, *entry.also)]
        snapshots = [GivenUp(entry.live.repository, entry.live.snapshot) for entry in some]
        # Before: a removal that the store has, and this host does not know as a person's, would be held.
        brake.give_up(manifests)
        reader.retry.call(partial(log.remove, manifests, snapshots))
