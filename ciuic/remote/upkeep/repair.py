"""Repair a remote: mend its logs, store lost or damaged chunks again, commit snapshots again whose manifests are lost, give up damaged packs.

Content comes from sound copies in the remote, of whatever host, and from the repository of this host.

Guarantees: every byte that is stored again was compared with its id. A damaged pack is deleted by a round of
collection, and only when everything that snapshots need of it is elsewhere; interrupted anywhere, the next repair goes on.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import closing

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance.check import CheckFinding, CheckReport
from ciuic.maintenance.verify import VerifyProgress
from ciuic.remote.format.names import PackRef, parse_manifest, split_ref
from ciuic.remote.format.pack import RemotePackReader
from ciuic.remote.log.rounds import Rounds
from ciuic.remote.log.writer_log import WriterLog, WriterState
from ciuic.remote.objects.model import NoSuchObject
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.reading.remote_repository import RemoteRepository, SpaceReader
from ciuic.remote.reading.remote_snapshots import CommittedEntry
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep.check import SpaceDamage, check_remote, check_rounds, check_slots, check_space
from ciuic.remote.upkeep.collect import open_collector
from ciuic.remote.upkeep.collector import CollectionPolicy
from ciuic.remote.upkeep.log_repair import check_logs, repair_logs, repair_rounds, sound_contents, store_again
from ciuic.remote.upload.outbox import UncommittedPacks
from ciuic.remote.upload.uploader import Labels, Uploader
from ciuic.repository import Repository
from ciuic.repository.errors import Archived, UnsupportedFormat
from ciuic.repository.model import PackKind
from ciuic.repository.pack_directory import Packs
from ciuic.repository.repository import PACKS_DIR
from ciuic.types import ChunkId, SnapshotId

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
            check_rounds(reader, before)
            repair_rounds(reader)
            check_logs(reader, before)
            repair_logs(reader, _sharing(local, reader), host, caches)
    for number in range(_MAX_PASSES):
        with reopen() as opened:
            if not number:
                check_slots(opened, before)
            mended = 0
            for reader, repository in zip(opened.readers, opened.repositories, strict=True):
                # Every byte once: later passes look for what only shows when a node above is there again.
                damage = check_space(
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
            mended = store_again(reader, sound_contents(repository, local, lost), lost)
        if local is not None:
            for name in sorted(damage.snapshots):
                entry = opened.snapshots.entries.get(name)
                if entry is not None and _commit_again(reader, local, entry, damaged, directory):
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


def _commit_again(
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
            stop=threading.Event(),
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
