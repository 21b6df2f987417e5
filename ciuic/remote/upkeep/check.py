"""Check and repair of a remote: find damage in every kind of object, mend logs and rounds, and store lost chunks again.

A check reads key slots, rounds, manifests, tables and records of packs, the structure of snapshots and, on request, every byte.
Damage is reported, never raised, and does not end the check.

A repair works as far as it can be proved what was there.

Logs: one that is gone, or cut at its end, shows in manifests that name it and that no log accounts for. A damaged log is
summed up anew from everything that can be proved: its readable entries, what a cache of this host had read of it, and
manifests, which are sealed as entries are and name the log that they were written for. A manifest whose commit is lost is
committed again, in the operator's log, by the rules for every commit.

Rounds: nothing is deleted by a round before its ``.final`` stands, and whichever ``.final`` stands is valid. A round of which
only the beginning is there, and cannot be read, is therefore ended with an empty one: a collector that still works on it
deletes nothing. Objects of rounds are never deleted, and rounds have no gaps: an unreadable one behind a gap, or a part
without the parts that are created before it, was planted, and is deleted. A ``.final`` that cannot be read, or is missing, between
a beginning and a ``.done`` that can be read is written anew: what the round condemned and is not there any more, which is at least
what it deleted, because ``.done`` says that all of it is deleted. A ``.done`` that cannot be read is written anew after what ``.final``
names is deleted, as by any collector. A ``.final`` that cannot be read in a round that has not ended: a collector that knows it may be
deleting still, so that another round of the same beginning follows, which deletes all of it (`Collector.mend`). One whose beginning
cannot be read either stays damage.

Chunks: stored again from sound copies in the remote, of whatever host, or in the repository of this host. Snapshots whose
manifests are lost are committed again.

Guarantees: nothing is deleted but damaged packs, planted objects, and objects that cannot be read and whose numbers no writer
reaches; a damaged pack goes by a round of collection, and only when everything that snapshots need of it is elsewhere. No log
is summed up before what was lost of it is committed again; every byte that is stored again was compared with its id. A snapshot
that only a lost entry gave up exists again. Interrupted anywhere, the next repair goes on.

References:
    docs/remote-format.md, sections 6 and 8
"""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Final, NamedTuple

import msgspec

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.maintenance.check import CheckFinding, CheckReport, Severity, add_damage
from ciuic.maintenance.verify import Damage, VerifyProgress, verify_snapshots
from ciuic.remote.access import KeySlots
from ciuic.remote.documents import (
    MAX_MANIFESTS,
    LiveManifest,
    RemoteManifest,
    StoredRound,
    create_round,
    decode_manifest,
    encode_round,
    object_digest,
    read_document,
    read_round,
)
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import (
    UPLOADING_NS,
    LogReader,
    LogSummary,
    Rounds,
    UnloggedManifest,
    is_uploader,
    read_log_cache,
    read_provable,
    unlogged_manifests,
)
from ciuic.remote.object_names import (
    MANIFESTS_PREFIX,
    MAX_NUMBER,
    ROUNDS_PREFIX,
    PackRef,
    RoundPart,
    is_slot,
    new_hex_id,
    pack_name,
    parse_manifest,
    parse_pack,
    parse_round,
    round_name,
    split_ref,
)
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, Objects
from ciuic.remote.pack import (
    PackFiller,
    RemotePackReader,
)
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.reading.remote_repository import RemoteRepository, SpaceReader
from ciuic.remote.reading.remote_snapshots import CommittedEntry, Manifests, RemoteSnapshots
from ciuic.remote.remote_index import RemoteIndex, list_packs, read_tables
from ciuic.remote.sealing.sealer import Sealer
from ciuic.remote.upkeep.collect import open_collector, operator_log
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.uploader import Labels, Persistence, UncommittedPacks, Uploader
from ciuic.remote.writer_log import SEVERAL_WRITERS, WriterLog, WriterState, sum_up_log
from ciuic.repository import Repository, Walker
from ciuic.repository import log as events
from ciuic.repository.errors import Archived, UnsupportedFormat
from ciuic.repository.identity import Bytes
from ciuic.repository.model import PackKind, PackRecord
from ciuic.repository.pack_directory import Packs
from ciuic.repository.pack_format import checksum
from ciuic.repository.repository import PACKS_DIR
from ciuic.repository.snapshot_format import decode_any_snapshot
from ciuic.structs import convert
from ciuic.types import ChunkId, SnapshotId
from ciuic.units import plural


def _sound_contents(
    repository: RemoteRepository, local: Repository | None, chunks: Iterable[ChunkId]
) -> Iterator[tuple[ChunkId, Bytes]]:
    """Yield the content of each of the chunks of which any sound copy is found; reading compares it with the id."""
    for chunk in chunks:
        for source in (repository, local):
            if source is None:
                continue
            try:
                yield chunk, source.chunks.get(chunk)
            except (Damaged, NotFound, Archived):
                continue
            break


def _store_again(
    reader: SpaceReader, contents: Iterable[tuple[ChunkId, Bytes]], kinds: Mapping[ChunkId, PackKind]
) -> int:
    """Store chunks in new packs, of these kinds; return how many. Nothing has to be committed: live snapshots refer to them."""
    filler = PackFiller(reader.space.objects, reader.space.sealer)
    number = 0
    for chunk, content in contents:
        record = PackRecord(chunk, 0, len(content), len(content), 0, checksum(content), b"")
        filler.add(kinds[chunk], record, content)
        number += 1
    for kind in set(kinds.values()):
        filler.send(kind)
    return number


# Manifests that are read at the same time.
_READING_THREADS: Final = 8
# A writer may append to a log while it is mended; it makes one entry for each snapshot.
_COMMIT_ATTEMPTS: Final = 10
_CACHES: Final = ("logs", "operator.logs")


class _LostCommit(NamedTuple):
    """Snapshot whose manifest is stored, and whose commit may have been in a damaged entry."""

    live: LiveManifest
    manifest: RemoteManifest
    packs: tuple[str, ...]


def _read_logs(reader: SpaceReader) -> LogReader:
    """Return all logs of the space, read anew: a cache does not notice damage of what it has."""
    logs = LogReader(reader.space.objects, reader.space.sealer, skip_damaged=True)
    logs.refresh()
    return logs


def _check_logs(reader: SpaceReader, report: CheckReport) -> None:
    """Add damage of logs to the report, and the snapshots that can be committed again."""
    logs = _read_logs(reader)
    for damaged in logs.damaged.values():
        for name, reason in damaged.problems.items():
            text = f"{name} is damaged: {reason}"
            report.found("error", "log", text, "ciuic check --remote --repair")
    _tell_writers(reader, logs, report)
    for one in _unlogged(reader, logs):
        text = f"{one.name} is stored, and no log commits or removes it: {one.reason}"
        report.found("error", "log", text, "ciuic check --remote --repair")
    if logs.damaged:
        for lost in _find_lost_commits(reader, logs):
            text = f"{lost.live.snapshot} of {lost.manifest.host} is stored, and no readable entry commits it"
            hint = "ciuic check --remote --repair commits it again"
            report.found("warning", "log", text, hint, (str(lost.live.snapshot),))
            report.damaged_snapshots.add(str(lost.live.snapshot))


def _tell_writers(reader: SpaceReader, logs: LogReader, report: CheckReport) -> None:
    """Add the repositories to which several hosts write, as after a disk was cloned, to the report."""
    writers: dict[str, list[str]] = {}
    for writer, summary in logs.logs.items():
        for repository in {live.repository for live in summary.committed.values() if not summary.retired}:
            writers.setdefault(repository, []).append(writer)
    space = reader.space
    for repository, some in writers.items():
        number = len(some) > 1 and sum(
            is_uploader(space.objects, space.sealer, writer, logs.logs[writer], repository) for writer in some
        )
        if number > 1:
            text = f"{number} writers upload the repository {repository}, each with a retention of its own"
            report.found("info", "log", text, SEVERAL_WRITERS)


def _unlogged(reader: SpaceReader, logs: LogReader) -> list[UnloggedManifest]:
    """Return the manifests whose commits are lost with a log, or the end of one; reads all logs once more."""
    space = reader.space
    stored = list(space.objects.list(MANIFESTS_PREFIX))
    logs.refresh()
    return unlogged_manifests(space.objects, space.sealer, stored, logs, time.time_ns() - UPLOADING_NS)


def _find_lost_commits(reader: SpaceReader, logs: LogReader) -> list[_LostCommit]:
    """Return the snapshots of damaged, cut and lost logs that no log commits or removes, each once.

    Some of them may never have been committed: their upload was interrupted at its end.
    """
    live, removed = logs.live(), logs.removed()
    space = reader.space
    unlogged = {one.name for one in _unlogged(reader, logs)}
    stored = [info.name for info in space.objects.list(MANIFESTS_PREFIX) if parse_manifest(info.name)]
    names = [name for name in stored if name not in live and name not in removed]
    with ThreadPoolExecutor(_READING_THREADS) as pool:
        found = [lost for lost in pool.map(partial(_read_lost_commit, reader), names) if lost is not None]
    known = Manifests(space, reader.cache)
    contents = {content for one in live.values() if (content := _content(known, one)) is not None}
    lost_commits = []
    for lost in found:
        content = (lost.live.repository, lost.manifest.snapshot)
        is_lost = lost.manifest.writer in logs.damaged or lost.live.manifest in unlogged
        if is_lost and content not in contents:
            contents.add(content)
            lost_commits.append(lost)
    return lost_commits


def _repair_logs(
    reader: SpaceReader, local: Repository | None, host: str, caches: Sequence[str] = ()
) -> None:
    """Mend all damaged logs of a space, and commit anew what lost or cut ones had; durable on return.

    Args:
        reader: Reader of the space.
        local: Repository of this host, for chunks that are lost; None where there is none.
        host: Name of this host, for people.
        caches: Further caches of logs, such as those of this host's uploader.

    Raises:
        UnsupportedFormat: a later version of ciuic wrote an entry.
        DamagedRemote: a log goes on faster than it can be read.
        RemoteUnreachable: the store did not answer for too long.
    """
    paths = [*(str(reader.cache.path / name) for name in _CACHES), *caches]
    for _ in range(_COMMIT_ATTEMPTS):
        logs = _read_logs(reader)
        if stray := [name for damaged in logs.damaged.values() for name in damaged.stray]:
            reader.space.objects.delete(stray)
            continue
        if not logs.damaged:
            if _unlogged(reader, logs):
                _commit_again(reader, local, host, logs)
            return
        for damaged in logs.damaged.values():
            if damaged.later:
                raise UnsupportedFormat(damaged.later, hint="nothing was repaired; update ciuic on this host")
        _commit_again(reader, local, host, _but_known(reader, logs, paths))
        # Commits were added, and the reader's removals may have grown.
        logs.refresh()
        for writer, damaged in logs.damaged.items():
            summary = _known_whole(reader, writer, damaged.summary.next, paths) or damaged.summary
            if max(len(summary.committed), len(summary.removed)) > MAX_MANIFESTS:
                raise DamagedRemote(
                    damaged.error.name,
                    f"{damaged.error.reason}; the log has too many snapshots to be summed up",
                )
            reader.retry.call(
                partial(
                    sum_up_log,
                    reader.space.objects,
                    reader.space.sealer,
                    writer,
                    summary,
                    logs.removed(),
                )
            )
    raise next(iter(logs.damaged.values())).error


def _read_lost_commit(reader: SpaceReader, name: str) -> _LostCommit | None:
    """Return the snapshot of a manifest; None for one that is gone or damaged, or of a later version."""
    space = reader.space
    try:
        manifest, digest = read_document(
            space.objects,
            name,
            lambda data: (decode_manifest(space.sealer, name, data), object_digest(data)),
        )
        stored = decode_any_snapshot(manifest.snapshot)
        fields = (stored.repository, stored.id, name, digest)
        live = convert(fields, LiveManifest)
    except (NoSuchObject, Damaged, UnsupportedFormat, msgspec.ValidationError):
        return None
    return _LostCommit(live, manifest, tuple(manifest.packs))


def _content(manifests: Manifests, live: LiveManifest) -> tuple[str, bytes] | None:
    try:
        return live.repository, manifests.read(live).snapshot
    except (Damaged, NotFound, UnsupportedFormat):
        return None


def _but_known(reader: SpaceReader, logs: LogReader, paths: Iterable[str]) -> LogReader:
    """Return the logs with those whole that a cache of this host has read to their ends."""
    for writer, damaged in list(logs.damaged.items()):
        if whole := _known_whole(reader, writer, damaged.summary.next, paths):
            logs.damaged[writer] = damaged._replace(summary=whole)
    return logs


def _known_whole(reader: SpaceReader, writer: str, next_: int, paths: Iterable[str]) -> LogSummary | None:
    """Return all of a log up to its end, from a cache and what is readable after it; None if no cache helps."""
    for path in paths:
        known = read_log_cache(path).get(writer) if os.path.exists(path) else None
        if known is None:
            continue
        space = reader.space
        found = read_provable(space.objects, space.sealer, writer, known)
        if not found.problems and found.summary.next == next_:
            return found.summary
    return None


def _commit_again(reader: SpaceReader, local: Repository | None, host: str, logs: LogReader) -> None:
    lost = _find_lost_commits(reader, logs)
    if not lost:
        return
    with tempfile.TemporaryDirectory(dir=reader.cache.path) as directory:
        index = RemoteIndex.open(f"{directory}/index.sqlite")
        with closing(index):
            log = operator_log(reader, host, index)
            reader.retry.call(log.hello)
            for one in lost:
                while True:
                    checked = log.rounds.version
                    _store_lacking(reader, local, index, one, lambda: index.follow(log.rounds))
                    commit = partial(
                        log.commit,
                        one.live.snapshot,
                        one.live.manifest,
                        one.live.digest,
                        one.packs,
                        checked=checked,
                        repository=one.live.repository,
                    )
                    if one.live.manifest in log.rounds.manifests or reader.retry.call(commit):
                        # A condemned manifest belongs to a snapshot that was given up, as a collector knew.
                        break


def _store_lacking(
    reader: SpaceReader,
    local: Repository | None,
    index: RemoteIndex,
    lost: _LostCommit,
    follow: Callable[[], None],
) -> None:
    """Store again what the snapshot needs and no pack has that stays, as far as a copy is found.

    What is found nowhere stays damage, which `ciuic check --remote` names once the snapshot is committed.
    """
    follow()
    index.refresh(reader.space.objects, reader.space.sealer)
    manifests = Manifests(reader.space, reader.cache)
    name = lost.live.manifest
    repository = RemoteRepository(reader, RemoteSnapshots({name: CommittedEntry(lost.live, manifests)}))
    kinds: dict[ChunkId, PackKind] = {}
    # As far as its trees can be read.
    reached = Walker(repository).walk(repository.snapshots.load(SnapshotId(name)), on_damage=lambda *_: None)
    for one in reached:
        kinds[one.id] = "data" if one.kind == "data" else "meta"
    stored = index.has_many(kinds)
    lacking = {chunk: kind for chunk, kind in kinds.items() if chunk not in stored}
    sources = _sound_contents(repository, local, lacking)
    _store_again(reader, sources, lacking)


_PARTS_IN_ORDER: Final[tuple[RoundPart, ...]] = ("begun", "final", "done")


def mend_rounds(objects: Objects, sealer: Sealer, new_id: Callable[[], str] = new_hex_id) -> None:
    """Delete planted objects of rounds, and end a round that cannot be read; durable on return.

    Any error may be raised between two requests, and another call goes on; ``new_id`` is for tests.

    Raises:
        RemoteRefused: these credentials may not write, or not delete.
    """
    parts: dict[int, set[RoundPart]] = {}
    for info in objects.list(ROUNDS_PREFIX):
        if name := parse_round(info.name):
            parts.setdefault(name.round, set()).add(name.part)
    # A round begins only after the one before has ended.
    end = 0
    while "done" in parts.get(end, ()) and parts[end].issuperset(_PARTS_IN_ORDER):
        end += 1
    planted = [
        round_name(round_, part)
        for round_, found in parts.items()
        for at, part in enumerate(_PARTS_IN_ORDER)
        if part in found
        and (round_ > end or not found.issuperset(_PARTS_IN_ORDER[:at]))
        and not _is_readable(objects, sealer, round_, part)
    ]
    objects.delete(planted)
    if parts.get(end) == {"begun"} and end < MAX_NUMBER and not _is_readable(objects, sealer, end, "begun"):
        empty = StoredRound(nonce=new_id())
        # Another collector's may stand meanwhile: then it deletes, and says when it has done so.
        if create_round(objects, sealer, end, "final", empty).nonce == empty.nonce:
            create_round(objects, sealer, end, "done", StoredRound(nonce=new_id()))
    for round_, found in sorted(parts.items()):
        if (
            round_ <= end
            and found.issuperset(("begun", "done"))
            and round_name(round_, "done") not in planted
        ):
            _mend_final(objects, sealer, round_, new_id)
    if end:
        _mend_done(objects, sealer, end - 1)


def _mend_final(objects: Objects, sealer: Sealer, round_: int, new_id: Callable[[], str]) -> None:
    """Write the ``.final`` of an ended round anew, if it cannot be read and the other parts can."""
    if _is_readable(objects, sealer, round_, "final"):
        return
    begun = _round_content(objects, sealer, round_, "begun")
    if begun is None or _round_content(objects, sealer, round_, "done") is None:
        return
    # Asked for one by one: a listing may lack something. Hosts that were away must hear of all that the round deleted.
    gone = StoredRound(
        nonce=new_id(),
        condemned=tuple(ref for ref in begun.condemned if objects.info(pack_name(ref)) is None),
        manifests=tuple(name for name in begun.manifests if objects.info(name) is None),
    )
    # Replaced, never deleted first: without it a collector would take the round for one that has not ended.
    objects.put(round_name(round_, "final"), [encode_round(sealer, round_, "final", gone)])


def _mend_done(objects: Objects, sealer: Sealer, round_: int) -> None:
    """Delete the ``.done`` of the last round if it cannot be read: nobody reads that of a round before, and the next collection ends this one.

    It may have been planted in a round that had not ended, whose ``.final`` a collection compares with the logs before it deletes by it.
    """
    if not _is_readable(objects, sealer, round_, "done"):
        objects.delete([round_name(round_, "done")])


def _round_content(objects: Objects, sealer: Sealer, round_: int, part: RoundPart) -> StoredRound | None:
    """Return an object of a round; None if this version cannot read it."""
    try:
        return read_round(objects, sealer, round_, part)
    except (DamagedRemote, NoSuchObject, UnsupportedFormat):
        return None


def _is_readable(objects: Objects, sealer: Sealer, round_: int, part: RoundPart) -> bool:
    try:
        read_round(objects, sealer, round_, part)
    except (DamagedRemote, NoSuchObject):
        return False
    except UnsupportedFormat:
        # Perhaps of a later version of ciuic, which can judge it.
        return True
    return True


_REPAIR_HINT = "ciuic check --remote --repair, on a host whose repository has it"


class SpaceDamage(NamedTuple):
    """Damage in one space, for a repair."""

    chunks: dict[ChunkId, PackKind]
    """Chunks of which a copy is missing or damaged, with the kind of pack that they belong in."""
    packs: frozenset[PackRef]
    """Packs of which any byte is damaged."""
    snapshots: frozenset[str]
    """Snapshots, by their names in the remote, whose manifests cannot be read."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.packs or self.snapshots)


def check_remote(
    opened: ReadableRemote,
    *,
    read_data: bool = False,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> CheckReport:
    """Check the remote; only reads.

    Args:
        opened: The remote.
        read_data: Read and verify every byte.
        progress: Called with the progress.

    Raises:
        RemoteUnreachable: the store did not answer for too long.
    """
    report = CheckReport(data_read=read_data)
    opened.read_manifests_anew()
    _check_top(opened, report)
    for reader, repository in zip(opened.readers, opened.repositories, strict=True):
        _check_logs(reader, report)
        _check_space(reader, repository, report, read_data=read_data, progress=progress)
    return report


def _check_top(opened: ReadableRemote, report: CheckReport) -> None:
    """Add lost identities of repositories, and key slots that cannot be used, to the report."""
    for lost in opened.lost_spaces:
        report.found("error", "configuration", lost.message, lost.hint or "")
    slots = KeySlots(opened.remote.objects)
    opened.readers[0].retry.call(slots.all)
    for one in slots.unusable:
        # Another name is nobody's slot.
        is_ours = is_slot(one.slot)
        hint = f"ciuic remote keys remove {shlex.quote(one.slot)}" + (
            ", and keys add with another key" if is_ours else ""
        )
        severity: Severity = "error" if is_ours else "warning"
        report.found(severity, "key slot", one.problem.message, hint)


def _check_space(
    reader: SpaceReader,
    repository: RemoteRepository,
    report: CheckReport,
    *,
    read_data: bool,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> SpaceDamage:
    """Check one space, add what is found to the report, and return what a repair has to mend."""
    space = reader.space
    _check_rounds(reader, report)
    packs = list_packs(space.objects)
    damaged: set[PackRef] = set()
    for ref, found in read_tables(space.objects, space.sealer, packs, packs, _READING_THREADS):
        if isinstance(found, CiuicError):
            damaged.add(ref)
            hint = "what snapshots need of it is reported as well, and nothing else is lost"
            if isinstance(found, ArchivedObject):
                hint = "its copy of the table is lost: ciuic remote thaw the snapshots that lack chunks, then ciuic remote tier"
            report.found("error", "pack", found.message, hint)
    # Tables that decayed since the cache learned them say nothing any more.
    reader.lookup.refresh()
    reader.lookup.forget(damaged)
    result = verify_snapshots(repository, checksum=read_data, progress=progress)
    chunks: dict[ChunkId, PackKind] = {}
    snapshots: set[str] = set()
    for damage in result.damages:
        pack = parse_pack(damage.file.removeprefix(f"{space.objects.url}/"))
        if damage.kind == "pack" and damage.chunk is None and pack in damaged:
            continue
        add_damage(report, damage, _REPAIR_HINT, in_pack=bool(damage.file))
        if pack is not None:
            damaged.add(pack)
        if damage.chunk is not None:
            chunks[damage.chunk] = _pack_kind(damage, pack)
        if damage.kind == "snapshot":
            snapshots.update(map(str, damage.snapshots))
    if reader.archived:
        text = f"{plural(len(reader.archived), 'pack is', 'packs are')} archived, and not read"
        report.found("info", "pack", text, "thaw them first: ciuic remote thaw")
    report.snapshots += len(result.snapshots)
    report.packs += len(packs)
    report.stored_bytes += sum(info.size_bytes for info in packs.values())
    return SpaceDamage(chunks, frozenset(damaged), frozenset(snapshots))


def _pack_kind(damage: Damage, ref: PackRef | None) -> PackKind:
    if ref is not None:
        return split_ref(ref)[0]
    return "data" if damage.kind == "data" else "meta"


def _check_rounds(reader: SpaceReader, report: CheckReport) -> None:
    """Add a round that cannot be read, or that is under way, to the report."""
    rounds = Rounds(reader.space.objects, reader.space.sealer)
    try:
        rounds.refresh()
        if rounds.finished >= 0:
            # A host that begins reads the last one.
            with suppress(NoSuchObject):
                read_round(reader.space.objects, reader.space.sealer, rounds.finished, "done")
    except (Damaged, UnsupportedFormat) as error:
        hint = "" if isinstance(error, UnsupportedFormat) else "ciuic check --remote --repair"
        report.found("error", "round", error.message, hint)
        return
    for problem in rounds.damaged.values():
        report.found("error", "round", problem.message, problem.hint or "")
    if rounds.unfinished is not None and not rounds.damaged:
        text = f"the collection {rounds.unfinished} is under way or was interrupted"
        report.found("info", "round", text, "ciuic prune --remote ends it; uploads go on")


# A node that is stored again may refer to others that are missing: as many passes as trees are deep.
_MAX_PASSES = 64
_MAX_COLLECTIONS = 2
# Nothing but what is damaged: the usual collection is `ciuic prune --remote`.
_NEVER_NS = 1 << 62

Reopen = Callable[[], ReadableRemote]


def repair_remote(
    reopen: Reopen,
    local: Repository | None,
    *,
    host: str,
    read_data: bool = False,
    caches: Sequence[str] = (),
    progress: Callable[[VerifyProgress], None] | None = None,
) -> CheckReport:
    """Check and repair a remote; what was mended is marked in the report, and durable on return.

    Args:
        reopen: Opens the remote for reading, as it is then.
        local: Repository of this host; None where there is none.
        host: Name of this host, for people.
        read_data: Read every byte, and mend what is damaged of it.
        caches: What this host's uploader has read of logs.
        progress: Called with the progress.

    Raises:
        RemoteUnreachable: the store did not answer for too long.
        RemoteRefused: these credentials may not write, or not delete.
    """
    before = CheckReport()
    gone: dict[str, set[PackRef]] = {}
    # Before anything else: they say which snapshots there are.
    with reopen() as opened:
        for reader in opened.readers:
            _check_rounds(reader, before)
            reader.retry.call(partial(mend_rounds, reader.space.objects, reader.space.sealer))
            _check_logs(reader, before)
            _repair_logs(reader, _sharing(local, reader), host, caches)
    for number in range(_MAX_PASSES):
        with reopen() as opened:
            opened.read_manifests_anew()
            if not number:
                _check_top(opened, before)
            mended = 0
            for reader, repository in zip(opened.readers, opened.repositories, strict=True):
                # Every byte once: later passes look for what only shows when a node above is there again.
                damage = _check_space(
                    reader, repository, before, read_data=read_data and not number, progress=progress
                )
                packs = gone.setdefault(reader.space.id, set())
                packs |= damage.packs
                if damage:
                    mended += _mend(opened, reader, repository, local, damage, frozenset(packs))
        if not mended:
            break
    with reopen() as opened:
        for reader in opened.readers:
            _replace_round(reader, host)
            _delete_packs(reader, frozenset(gone.get(reader.space.id, ())), host)
    with reopen() as opened:
        after = check_remote(opened, read_data=read_data, progress=progress)
    _add_repaired(after, before)
    return after


def _add_repaired(after: CheckReport, before: CheckReport) -> None:
    left = {finding.message for finding in after.findings}
    repaired: dict[str, CheckFinding] = {}
    for finding in before.findings:
        if finding.severity != "info" and finding.message not in left:
            finding.repaired, finding.hint = True, ""
            repaired[finding.message] = finding
    after.findings[:0] = repaired.values()


def _mend(
    opened: ReadableRemote,
    reader: SpaceReader,
    repository: RemoteRepository,
    local: Repository | None,
    damage: SpaceDamage,
    damaged: frozenset[PackRef],
) -> int:
    """Mend what can be; return how many chunks and manifests were stored again."""
    local = _sharing(local, reader)
    with tempfile.TemporaryDirectory(dir=reader.cache.path) as directory:
        # Of its own: those in the cache may know tables that have decayed since.
        index = RemoteIndex.open(f"{directory}/index.sqlite")
        with closing(index):
            rounds = _rounds(reader)
            index.follow(rounds)
            index.refresh(reader.space.objects, reader.space.sealer)
            index.drop(damaged)
            wanted = {**_records(reader, damaged), **damage.chunks}
            stored = index.has_many(wanted)
            lost = {chunk: kind for chunk, kind in wanted.items() if chunk not in stored}
            mended = _store_again(reader, _sound_contents(repository, local, lost), lost)
        if local is not None:
            for name in sorted(damage.snapshots):
                entry = opened.snapshots.entries.get(name)
                if entry is not None and _commit_damaged_again(reader, local, entry, damaged, directory):
                    mended += 1
    return mended


def _sharing(local: Repository | None, reader: SpaceReader) -> Repository | None:
    """Return the repository of this host; None where it has other names for chunks, and so none of them."""
    return None if local is None or local.identity != reader.space.identity else local


def _rounds(reader: SpaceReader) -> Rounds:
    rounds = Rounds(reader.space.objects, reader.space.sealer, known=None)
    rounds.refresh()
    return rounds


def _records(reader: SpaceReader, packs: frozenset[PackRef]) -> dict[ChunkId, PackKind]:
    """Return what is in packs that are damaged, as far as their tables can be read."""
    found: dict[ChunkId, PackKind] = {}
    for ref in packs:
        pack = RemotePackReader(reader.space.sealer, ref)
        try:
            records = pack.read_table(reader.space.objects)
        except (NoSuchObject, Damaged, UnsupportedFormat, Archived):
            continue
        found.update((record.id, split_ref(ref)[0]) for record in records)
    return found


def _commit_damaged_again(
    reader: SpaceReader, local: Repository, entry: CommittedEntry, damaged: frozenset[PackRef], directory: str
) -> bool:
    """Upload a snapshot whose manifest is lost once more, and give up the lost one; False if it is not here."""
    live = entry.live
    if live.repository != local.id or live.snapshot not in local.snapshots.names():
        return False
    space, name = reader.space, parse_manifest(live.manifest)
    rounds = Rounds(space.objects, space.sealer, known=None)
    log = WriterLog(
        space.objects,
        space.sealer,
        WriterState(str(reader.cache.path / f"repair-{local.id}")),
        rounds,
        host=entry.host,
        repository=local.id,
    )
    labels = (
        Labels() if name is None else Labels("" if name.job == "files" else name.job, name.epoch, name.step)
    )
    packs = Packs(f"{local.path}/{PACKS_DIR}", bytes.fromhex(local.id), local.config.hash)
    index = RemoteIndex.open(f"{directory}/{live.snapshot}.sqlite")
    with closing(index), closing(packs):
        uploader = Uploader(
            local,
            packs,
            space,
            log,
            index,
            UncommittedPacks(directory),
            host=entry.host,
            persist=Persistence(threading.Event()),
            labels=lambda repository, snapshot: labels,
        )
        uploader.begin()
        index.drop(damaged)
        try:
            uploader.upload(SnapshotId(live.snapshot))
        except (Damaged, NotFound, Archived):
            return False
        uploader.give_up([live.manifest])
    return True


def _replace_round(reader: SpaceReader, host: str) -> None:
    """End a round whose ``.final`` cannot be read, once all that snapshots need can be."""
    rounds = Rounds(reader.space.objects, reader.space.sealer)
    rounds.refresh()
    if not rounds.damaged:
        return
    # The index of this host may be without what it knows that the round has deleted.
    with open_collector(reader, host=host, fresh=True) as collector:
        try:
            reader.retry.call(collector.mend)
        except (Damaged, NotFound, Archived) as error:
            events.warning("remote_round_not_mended", error=error.message)


def _delete_packs(reader: SpaceReader, damaged: frozenset[PackRef], host: str) -> None:
    """Delete damaged packs that nothing needs any more."""
    if not damaged:
        return
    policy = CollectionPolicy(young_ns=_NEVER_NS, repack_share=0, damaged=damaged)
    with open_collector(reader, host=host, policy=policy) as collector:
        # The first may end the round of another, which has nothing to do with these packs.
        for _ in range(_MAX_COLLECTIONS):
            try:
                reader.retry.call(collector.run)
            except (Damaged, NotFound, Archived):
                # Something of a snapshot is still lost: all that is there is left as it is.
                return
