"""Move packs to colder storage classes by age and kind: plan by the rules, say so in the log, copy tables, change classes.

Invariants:

* Only data packs become cold. Logs, manifests, packs of trees and block maps, keys and remote.json never do, so that snapshots
  can be listed, shown and compared, and their structure verified, at once.
* A copy of a pack's table is below ``tables/`` before the pack becomes cold, so that an index can be made from the bucket alone.
* A pack becomes cold only if every snapshot that needs any of its chunks is as old, and of the kind, that the rule says.
  It never becomes warmer again by a rule; new snapshots may rely on it.
* A mover is a writer: which packs move is in its log before the first one does. A collection whose fence follows spares them, and a
  mover leaves out what a round before has condemned (`WriterLog.move`). So nothing that was deleted comes back by a late copy.
* An object keeps its name and its bytes when it moves within a store, so that readers find it all the time.

Killed at any request, the next run goes on; packs that a killed mover named are spared by collections until this host's next
run, or until its log is ended after 30 days.

References:
    docs/decisions/tiers.md; docs/remote-format.md, sections 2 and 6
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, NamedTuple

from ciuic.config import TierRule
from ciuic.errors import Damaged
from ciuic.remote.format.documents import LiveManifest
from ciuic.remote.format.names import (
    PackRef,
    pack_name,
    pack_prefix,
    parse_manifest,
    parse_pack,
    split_ref,
    table_name,
)
from ciuic.remote.format.pack import RemotePackReader
from ciuic.remote.log.log_reader import LogReader
from ciuic.remote.log.writer_log import WriterLog
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject
from ciuic.remote.objects.storage_classes import ObjectClasses, find_class
from ciuic.remote.reading.remote_repository import SpaceReader
from ciuic.remote.reading.remote_snapshots import CommittedEntry, Manifests, RemoteSnapshots
from ciuic.remote.remote_index import RemoteIndex, list_packs
from ciuic.remote.upkeep.collect import operator_log
from ciuic.remote.upkeep.marking import LiveChunks, NeededChunks, add_bases, live_chunks, live_groups
from ciuic.repository.errors import UnsupportedFormat
from ciuic.types import SnapshotId

_FILES_JOB: Final = "files"
"""Job in the names of manifests of snapshots of files; every other one is that of a training."""


class AgedSnapshot(NamedTuple):
    """Facts of a snapshot that rules look at."""

    manifest: str
    """Name of its manifest."""
    host: str
    job: str
    time_ns: int
    """Time of its cut by the clock of its host."""


def old_snapshots(rule: TierRule, snapshots: Sequence[AgedSnapshot], now_ns: int) -> set[str]:
    """Return the manifests of the snapshots that the rule lets become cold.

    Args:
        rule: The rule.
        snapshots: All snapshots that exist.
        now_ns: Time now.
    """
    since_ns = now_ns - rule.after_seconds * 10**9
    lines: dict[tuple[str, str], list[AgedSnapshot]] = {}
    for snapshot in snapshots:
        lines.setdefault((snapshot.host, snapshot.job), []).append(snapshot)
    old: set[str] = set()
    for (_, job), line in lines.items():
        if rule.kind != "all" and (rule.kind == "files") != (job == _FILES_JOB):
            continue
        line.sort(key=lambda snapshot: (snapshot.time_ns, snapshot.manifest), reverse=True)
        old.update(one.manifest for one in line[rule.keep_newest :] if one.time_ns <= since_ns)
    return old


def cold_targets(
    index: RemoteIndex,
    live: LiveChunks,
    warm: Sequence[LiveChunks],
    rules: Sequence[TierRule],
    *,
    scheme: str,
) -> dict[PackRef, TierRule]:
    """Return the rule for each data pack that may become cold: the one with the coldest class.

    A pack without any live chunk is left to the collection.

    Args:
        index: Index of the remote.
        live: Chunks that snapshots need, bases included.
        warm: For each rule, the chunks that other snapshots than its old ones need, bases included.
        rules: The rules.
        scheme: Scheme of the remote's URL.
    """
    needed: set[int] = set()
    # Bit n of a pack's number: rule n keeps it warm.
    kept_warm: dict[int, int] = {}
    for chunk, copies in live_groups(index, live):
        bits = sum(1 << at for at, chunks in enumerate(warm) if chunk in chunks)
        for copy in copies:
            needed.add(copy.pack)
            kept_warm[copy.pack] = kept_warm.get(copy.pack, 0) | bits
    coldest = sorted(
        range(len(rules)), key=lambda at: find_class(scheme, rules[at].storage_class).coldness, reverse=True
    )
    targets: dict[PackRef, TierRule] = {}
    for number in needed:
        ref = index.ref(number)
        allowed = [at for at in coldest if not kept_warm[number] >> at & 1]
        if allowed and split_ref(ref)[0] == "data":
            targets[ref] = rules[allowed[0]]
    return targets


def colder(
    targets: Mapping[PackRef, TierRule], classes: Mapping[PackRef, str], *, scheme: str
) -> dict[PackRef, str]:
    """Return the new class of each pack that is to move: to a colder class than it has, and not out of an archive.

    Args:
        targets: Rule for each pack that may become cold.
        classes: Storage class that each pack has now; empty for the default one. Packs that are left out are not there.
        scheme: Scheme of the remote's URL.
    """
    moves: dict[PackRef, str] = {}
    for ref, rule in targets.items():
        if ref not in classes:
            continue
        has = find_class(scheme, classes[ref])
        # What is archived cannot be copied before it is thawed, which costs more than it saves.
        if not has.is_archive and has.coldness < find_class(scheme, rule.storage_class).coldness:
            moves[ref] = rule.storage_class.upper()
    return moves


def _check_rules(rules: Iterable[TierRule], scheme: str) -> None:
    """Raise UsageError for a storage class that stores of this scheme do not have."""
    for rule in rules:
        find_class(scheme, rule.storage_class)


_BATCH_PACKS: Final = 256
"""Packs that one entry of the log names: an entry for each would double the requests, and all in one would keep more from
collections than moves."""
_THREADS: Final = 8

_MarkLive = Callable[[Mapping[str, LiveManifest]], NeededChunks]


class PlannedMoves(NamedTuple):
    """Moves in one space of a remote."""

    space: str
    """Id of the remote, or of the repository whose space it is."""
    moves: dict[PackRef, str]
    """New class of each pack that moves, or would."""
    sizes: dict[PackRef, int]
    """Bytes of each."""
    skipped: dict[PackRef, str]
    """Packs that were to move and did not, with the reason."""

    @property
    def bytes(self) -> int:
        """Bytes of all moved packs."""
        return sum(self.sizes.get(ref, 0) for ref in self.moves)


class _Mover:
    """Mover of the packs of one space. Used by one thread.

    Args:
        reader: Reader of the space.
        classes: Storage classes of the space's objects.
        log: This host's log for operators.
        logs: Reader of all logs.
        index: Index of the space that follows the log's rounds.
        mark: Function that finds the chunks of snapshots.
    """

    def __init__(
        self,
        reader: SpaceReader,
        classes: ObjectClasses,
        *,
        log: WriterLog,
        logs: LogReader,
        index: RemoteIndex,
        mark: _MarkLive,
    ) -> None:
        self._reader = reader
        self._objects = reader.space.objects
        self._sealer = reader.space.sealer
        self._classes = classes
        self._log = log
        self._logs = logs
        self._index = index
        self._mark = mark

    def run(self, rules: Sequence[TierRule], now_ns: int, *, dry_run: bool = False) -> PlannedMoves:
        """Apply the rules; what moved is durable on return.

        Args:
            rules: The rules.
            now_ns: Time now.
            dry_run: Only read, and return what would move.

        Raises:
            UsageError: the store has no such class.
            Damaged: a log, a round, a manifest or a tree cannot be read; nothing was moved.
            RemoteUnreachable: another call goes on.
        """
        _check_rules(rules, self._classes.scheme)
        if dry_run:
            self._log.rounds.refresh()
        else:
            # Before anything is listed: what is condemned later has a fence in this log.
            self._log.hello()
        self._index.follow(self._log.rounds)
        planned = self._plan(rules, now_ns)
        if dry_run:
            return planned
        skipped: dict[PackRef, str] = {}
        refs = sorted(planned.moves)
        for start in range(0, len(refs), _BATCH_PACKS):
            skipped |= self._move_batch(refs[start : start + _BATCH_PACKS], planned.moves)
        own = self._logs.logs.get(self._log.writer)
        # Also what an earlier run named before it was killed.
        if refs or (own is not None and own.moving):
            self._log.move((), checked=self._log.rounds.version)
        moved = {ref: name for ref, name in planned.moves.items() if ref not in skipped}
        return planned._replace(moves=moved, skipped=skipped)

    def _plan(self, rules: Sequence[TierRule], now_ns: int) -> PlannedMoves:
        self._logs.refresh()
        self._index.refresh(self._objects, self._sealer)
        snapshots = self._logs.live()
        aged = self._aged(snapshots)
        live = self._chunks(snapshots)
        warm: list[LiveChunks] = []
        for rule in rules:
            old = old_snapshots(rule, aged, now_ns)
            warm.append(self._chunks({name: one for name, one in snapshots.items() if name not in old}))
        targets = cold_targets(self._index, live, warm, rules, scheme=self._classes.scheme)
        # Without a candidate the store is not asked.
        moves = colder(targets, self._class_of_packs(), scheme=self._classes.scheme) if targets else {}
        condemned = self._log.rounds.condemned
        moves = {ref: name for ref, name in moves.items() if ref not in condemned}
        # By a listing: the index does not have the size of a pack that it learned of from a log.
        listed = list_packs(self._objects) if moves else {}
        sizes = {ref: info.size_bytes for ref, info in listed.items() if ref in moves}
        return PlannedMoves(self._reader.space.id, moves, sizes, {})

    def _aged(self, snapshots: Mapping[str, LiveManifest]) -> list[AgedSnapshot]:
        manifests = Manifests(self._reader.space, self._reader.cache)
        found = RemoteSnapshots({name: CommittedEntry(live, manifests) for name, live in snapshots.items()})
        aged = []
        for name in snapshots:
            labels = parse_manifest(name)
            host, job = ("", "") if labels is None else (labels.host, labels.job)
            aged.append(AgedSnapshot(name, host, job, found.load(SnapshotId(name)).time_ns))
        return aged

    def _chunks(self, snapshots: Mapping[str, LiveManifest]) -> NeededChunks:
        needed = self._mark(snapshots)
        add_bases(self._index, needed)
        return needed

    def _class_of_packs(self) -> dict[PackRef, str]:
        """Return the class of each pack but those that were thawed to be read."""
        return {
            ref: found.storage_class
            for found in self._classes.list(pack_prefix("data"))
            if (ref := parse_pack(found.name)) is not None and not found.is_thawed
        }

    def _move_batch(self, refs: Sequence[PackRef], moves: Mapping[PackRef, str]) -> dict[PackRef, str]:
        """Move these packs; return those that did not move, with the reason."""
        skipped: dict[PackRef, str] = {}
        while True:
            checked = self._log.rounds.version
            # Not `RemoteIndex.follow`, after which the rounds no longer say what those that ended have deleted.
            condemned = self._log.rounds.condemned
            skipped |= {ref: "a collection deletes it" for ref in refs if ref in condemned}
            chosen = [ref for ref in refs if ref not in skipped]
            if not chosen or self._log.move(chosen, checked=checked):
                break
        with ThreadPoolExecutor(_THREADS) as pool:
            for ref, problem in zip(
                chosen, pool.map(lambda ref: self._move(ref, moves[ref]), chosen), strict=True
            ):
                if problem:
                    skipped[ref] = problem
        return skipped

    def _move(self, ref: PackRef, storage_class: str) -> str:
        """Move a pack; return why it did not move, or nothing."""
        pack, objects = RemotePackReader(self._sealer, ref), self._objects
        try:
            # Read from the pack each time: a copy that is there may be another user's.
            copy = pack.copy_of_table(objects)
            objects.put(table_name(ref), [copy])
            self._reader.retry.call(lambda: self._classes.change(pack_name(ref), storage_class))
        except NoSuchObject:
            return "it is not there any more"
        except ArchivedObject:
            return "it is archived already"
        except (Damaged, UnsupportedFormat) as error:
            return error.message
        return ""


@contextmanager
def _open_mover(
    reader: SpaceReader, classes: ObjectClasses, *, host: str, between: Callable[[], None] = lambda: None
) -> Iterator[_Mover]:
    """Provide a mover of a space, with an index of its own in the cache.

    Args:
        reader: Reader of the space.
        classes: Storage classes of the space's objects.
        host: Name of this host, for people.
        between: Called often.
    """
    space = reader.space
    marked = live_chunks(reader, between=between)

    def mark(snapshots: Mapping[str, LiveManifest]) -> NeededChunks:
        reader.lookup.refresh()
        return marked(snapshots)

    with reader.cache.index_path() as path:
        index = RemoteIndex.open(path)
        try:
            yield _Mover(
                reader,
                classes,
                log=operator_log(reader, host, index),
                logs=LogReader(
                    space.objects, space.sealer, cache_path=str(reader.cache.path / "operator.logs")
                ),
                index=index,
                mark=mark,
            )
        finally:
            index.close()


def apply_rules(
    readers: Iterable[tuple[SpaceReader, ObjectClasses]],
    rules: Sequence[TierRule],
    now_ns: int,
    *,
    host: str,
    dry_run: bool = False,
    between: Callable[[], None] = lambda: None,
) -> list[PlannedMoves]:
    """Apply the rules in all spaces of a remote; see `_Mover.run`."""
    results = []
    for reader, classes in readers:
        with _open_mover(reader, classes, host=host, between=between) as mover:
            results.append(mover.run(rules, now_ns, dry_run=dry_run))
    return results
