"""Repair the logs, rounds and lost chunks of a space, as far as it can be proved what they were.

Logs: one that is gone, or cut at its end, shows in manifests that name it and that no log accounts for. A damaged log is
summed up anew from everything that can be proved: its readable entries, what a cache of this host had read of it, and
manifests, which are sealed as entries are and name the log that they were written for. A manifest whose commit is lost is
committed again, in the operator's log, by the rules for every commit.

Rounds: nothing is deleted by a round before its ``.final`` stands, and whichever ``.final`` stands is valid. A round of which
only the beginning is there, and cannot be read, is therefore ended with an empty one: a collector that still works on it
deletes nothing. Objects of rounds are never deleted, and rounds have no gaps: an unreadable one behind a gap, or a part
without the parts that are created before it, was planted, and is deleted. A ``.final`` that cannot be read beside a readable
beginning stays damage: what it deleted is not known.

Chunks: stored again from sound copies in the remote or in the repository of this host.

Guarantees: nothing is deleted but planted objects and objects that cannot be read and whose numbers no writer reaches; no
log is summed up before what was lost of it is committed again; every byte that is stored again was compared with its id. A
snapshot that only a lost entry gave up exists again.

References:
    docs/remote-format.md, sections 6 and 8
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple

import msgspec

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance.check import CheckFinding, CheckReport
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.documents import (
    MAX_MANIFESTS,
    LiveManifest,
    RemoteManifest,
    StoredRound,
    create_round,
    decode_manifest,
    object_digest,
    read_document,
    read_round,
)
from ciuic.remote.format.names import (
    MANIFESTS_PREFIX,
    MAX_NUMBER,
    ROUNDS_PREFIX,
    RoundPart,
    new_hex_id,
    new_pack_ref,
    parse_manifest,
    parse_round,
    round_name,
)
from ciuic.remote.format.pack import RemotePackWriter
from ciuic.remote.log.compaction import sum_up_log
from ciuic.remote.log.log_reader import (
    UPLOADING_NS,
    LogReader,
    LogSummary,
    UnloggedManifest,
    read_log_cache,
    read_provable,
    unlogged_manifests,
)
from ciuic.remote.objects.model import NoSuchObject
from ciuic.remote.reading.remote_repository import RemoteRepository, SpaceReader
from ciuic.remote.reading.remote_snapshots import CommittedEntry, Manifests, RemoteSnapshots
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep.collect import operator_log
from ciuic.repository import Repository, Walker
from ciuic.repository.errors import Archived, UnsupportedFormat
from ciuic.repository.identity import Bytes
from ciuic.repository.model import PackKind, PackRecord
from ciuic.repository.pack_format import checksum
from ciuic.repository.snapshot_format import decode_any_snapshot
from ciuic.types import ChunkId, SnapshotId


def sound_contents(
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


def store_again(
    reader: SpaceReader, contents: Iterable[tuple[ChunkId, Bytes]], kinds: Mapping[ChunkId, PackKind]
) -> int:
    """Store chunks in new packs, of these kinds; return how many. Nothing has to be committed: live snapshots refer to them."""
    writers: dict[PackKind, RemotePackWriter] = {}
    number = 0

    def send(kind: PackKind) -> None:
        writer = writers.pop(kind)
        parts = writer.finish()
        reader.space.objects.put(writer.name, parts)

    for chunk, content in contents:
        kind = kinds[chunk]
        if kind in writers and not writers[kind].fits(len(content)):
            send(kind)
        if kind not in writers:
            writers[kind] = RemotePackWriter(reader.space.sealer, new_pack_ref(kind))
        record = PackRecord(chunk, 0, len(content), len(content), 0, checksum(content), b"")
        if writers[kind].add(record, content) is None:
            raise AssertionError("a new pack has room for a chunk")
        number += 1
    for kind in list(writers):
        send(kind)
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


def check_logs(reader: SpaceReader, report: CheckReport) -> None:
    """Add damage of logs to the report, and the snapshots that can be committed again."""
    logs = _read_logs(reader)
    for damaged in logs.damaged.values():
        for name, reason in damaged.problems.items():
            text = f"{name} is damaged: {reason}"
            report.findings.append(CheckFinding("error", "log", text, "ciuic check --remote --repair"))
    for one in _unlogged(reader, logs):
        text = f"{one.name} is stored, and no log commits or removes it: {one.reason}"
        report.findings.append(CheckFinding("error", "log", text, "ciuic check --remote --repair"))
    if logs.damaged:
        for lost in _find_lost_commits(reader, logs):
            text = f"{lost.live.snapshot} of {lost.manifest.host} is stored, and no readable entry commits it"
            hint = "ciuic check --remote --repair commits it again"
            report.findings.append(CheckFinding("warning", "log", text, hint, snapshot=lost.live.snapshot))


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


def repair_logs(reader: SpaceReader, local: Repository | None, host: str, caches: Sequence[str] = ()) -> None:
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
        live = msgspec.convert(fields, LiveManifest)
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
    sources = sound_contents(repository, local, lacking)
    store_again(reader, sources, lacking)


_PARTS_IN_ORDER: Final[tuple[RoundPart, ...]] = ("begun", "final", "done")


def repair_rounds(reader: SpaceReader) -> None:
    """Delete planted objects of rounds, and end a round that cannot be read; durable on return.

    Raises:
        RemoteUnreachable: the store did not answer for too long.
        RemoteRefused: these credentials may not write, or not delete.
    """
    reader.retry.call(lambda: _repair_rounds(reader))


def _repair_rounds(reader: SpaceReader) -> None:
    objects = reader.space.objects
    parts: dict[int, set[RoundPart]] = {}
    for info in objects.list(ROUNDS_PREFIX):
        if name := parse_round(info.name):
            parts.setdefault(name.round, set()).add(name.part)
    # A round begins only after the one before has ended.
    end = 0
    while "done" in parts.get(end, ()) and _is_whole_round(parts[end]):
        end += 1
    planted = [
        round_name(round_, part)
        for round_, found in parts.items()
        for at, part in enumerate(_PARTS_IN_ORDER)
        if part in found
        and (round_ > end or not found.issuperset(_PARTS_IN_ORDER[:at]))
        and not _is_readable(reader, round_, part)
    ]
    objects.delete(planted)
    if parts.get(end) == {"begun"} and end < MAX_NUMBER and not _is_readable(reader, end, "begun"):
        empty = StoredRound(nonce=new_hex_id())
        # Another collector's may stand meanwhile: then it deletes, and says when it has done so.
        if create_round(objects, reader.space.sealer, end, "final", empty).nonce == empty.nonce:
            create_round(objects, reader.space.sealer, end, "done", StoredRound(nonce=new_hex_id()))


def _is_whole_round(found: set[RoundPart]) -> bool:
    return found.issuperset(_PARTS_IN_ORDER)


def _is_readable(reader: SpaceReader, round_: int, part: RoundPart) -> bool:
    try:
        read_round(reader.space.objects, reader.space.sealer, round_, part)
    except (DamagedRemote, NoSuchObject):
        return False
    except UnsupportedFormat:
        # Perhaps of a later version of ciuic, which can judge it.
        return True
    return True
