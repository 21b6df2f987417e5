"""Recovery when a writer opens: index what the packs hold beyond the index, and cut off torn tails.

Bytes are cut off only if no index ever vouched for them and they form no segment. Where the index is lost
nothing is cut at all: such a pack is just not appended to again, because what looks torn could be damage to
something committed. A pack newer than all those an intact index knows was begun by a writer that died: what
is torn there was never committed, because a commit syncs whole segments first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ciuic.errors import NotFound
from ciuic.repository import log
from ciuic.repository import pack_format as pf
from ciuic.repository.chunk_reader import BadCopyError, location_of, read_stored
from ciuic.repository.errors import DamagedPack
from ciuic.repository.index_database import PACKS_SEEN, changed_ns, settled_ns
from ciuic.repository.model import PackKind, PackRecord
from ciuic.repository.pack_directory import Packs, Segment
from ciuic.repository.writer_index import WriterIndex
from ciuic.system.disk import Disk


class Tail(NamedTuple):
    """Unsealed pack that can be appended to, at ``end``."""

    number: int
    end: int


def reconcile(
    disk: Disk, packs: Packs, index: WriterIndex, progress: Callable[[int, int], None] | None = None
) -> dict[PackKind, Tail]:
    """Make the index agree with the packs; return the pack of each kind to append to.

    Raises:
        OSError: the disk failed.
    """
    tails = _unchanged(packs, index)
    if tails is not None:
        index.all_seen = True
        return tails
    index.all_seen = False
    # Taken before the packs are read: a change meanwhile makes the next writer look again.
    seen_ns = settled_ns(packs.directory, wait=False)
    covered = index.covered()
    sizes = packs.sizes()
    total = sum(sizes.values())
    for number in covered.keys() - sizes.keys():
        log.warning("pack_missing", pack=f"{number:016x}")
        index.drop(number, None)
    # Without this fact the index was just made, and says nothing about which packs are new.
    newest = max(covered, default=0) if index.last_pack() else None
    tails = {}
    done = 0
    for number, size_bytes in sizes.items():
        known, sealed = covered.get(number, (-1, False))
        end: int | None = known
        if known != size_bytes:
            # Shorter than indexed: rows may point beyond the end, so the pack is read anew.
            if known > size_bytes:
                log.warning("pack_shorter_than_indexed", pack=f"{number:016x}", size_bytes=size_bytes)
                index.drop_rows(number)
                known = -1
            # Begun by a writer that died: nothing in it was committed, so its torn end may be cut.
            fresh = newest is not None and number > newest
            sealed, end = _adopt_pack(disk, packs, index, number, known, fresh)
        if not sealed and end is not None:
            tails[packs.kind(number)] = Tail(number, end)
        done += size_bytes
        if progress is not None:
            progress(done, total)
    # After a lost index the numbers go on from the newest pack that is there: none may be used twice.
    if sizes and index.last_pack() < max(sizes):
        index.set_last_pack(max(sizes))
    index.set_seen(PACKS_SEEN, seen_ns)
    return tails


def _unchanged(packs: Packs, index: WriterIndex) -> dict[PackKind, Tail] | None:
    """Return the packs to append to if packs/ is as the index last saw it; else None.

    A sealed pack changes only by damage, which its readers find.
    """
    # A writer opens in 0.7 ms so; it took 109 ms to compare 10,000 packs and 1,000 snapshots
    # (docs/decisions/snapshot-of-nothing.md).
    if index.seen_ns(PACKS_SEEN) != changed_ns(packs.directory):
        return None
    tails: dict[PackKind, Tail] = {}
    # Ascending, so that the newest pack of each kind is the one to append to.
    for number, known in sorted(index.unsealed().items()):
        try:
            if packs.size(number) != known:
                return None
            tails[packs.kind(number)] = Tail(number, known)
        except NotFound:
            return None
    # Not if the index failed meanwhile.
    return tails if index.seen_ns(PACKS_SEEN) else None


def _adopt_pack(
    disk: Disk, packs: Packs, index: WriterIndex, number: int, known: int, fresh: bool
) -> tuple[bool, int | None]:
    """Index what is new in one pack; return (sealed, where to append or None)."""
    try:
        records = packs.footer(number)
    except DamagedPack as error:
        log.warning("footer_damaged", error=str(error))
        records = None
    # The footer was written after everything before it was synced.
    if records is not None:
        index.add(number, packs.size(number), True, records)
        return True, None
    segments = list(packs.scan(number, pf.align(max(known, pf.ALIGN_BYTES))))
    vouched = known > 0
    # No record at all: the writer died before it had written a segment.
    if not vouched and not any(segment.records for segment in segments):
        log.warning("empty_pack_removed", pack=f"{number:016x}")
        packs.forget(number)
        disk.remove_file(packs.path(number))
        return False, None
    return False, _index_tail(disk, packs, index, number, known, segments, may_cut=known > 0 or fresh)


def _index_tail(
    disk: Disk,
    packs: Packs,
    index: WriterIndex,
    number: int,
    known: int,
    segments: list[Segment],
    *,
    may_cut: bool,
) -> int | None:
    bad = {
        record.offset
        for segment in segments
        for record in segment.records
        if not _payload_good(packs, number, record)
    }
    # A whole table whose payloads are all wrong, at the end, is what a crash leaves; elsewhere it is damage
    # to report.
    sound = [
        at
        for at, segment in enumerate(segments)
        if segment.damage is None and any(record.offset not in bad for record in segment.records)
    ]
    keep = sound[-1] + 1 if sound else 0
    end = segments[keep - 1].end if keep else max(known, pf.ALIGN_BYTES)
    torn = keep < len(segments) or packs.size(number) > end
    if not may_cut:
        keep = len(segments)
    kept = [record for segment in segments[:keep] for record in segment.records]
    fd = disk.open_write(packs.path(number))
    try:
        if torn and may_cut:
            log.info("torn_tail_cut_off", pack=f"{number:016x}", offset=end)
            disk.truncate(fd, end)
            torn = False
        # Nothing has promised that these bytes are durable: make them so before the index vouches for them.
        disk.sync(fd)
    finally:
        disk.close(fd)
    index.add(number, packs.size(number), False, kept, frozenset(bad))
    return None if torn else end


def _payload_good(packs: Packs, number: int, record: PackRecord) -> bool:
    try:
        return pf.checksum(read_stored(packs, location_of(number, record))) == record.checksum
    except BadCopyError:
        return False
