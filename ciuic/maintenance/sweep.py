"""Sweep: the second half of garbage collection, which removes and rewrites packs.

Guarantees: a pack is removed only when nothing in it is live. A live chunk is copied and durable before the pack that it came
from is removed (Writer.rewrite_pack). A pack whose list may be incomplete (an interrupted write leaves such) is removed only when
every live chunk is listed elsewhere or in the readable part of that list. Dropping comes first and needs no free space; rewriting
is done as far as the disk has room. A sweep may be stopped between any two packs, or killed anywhere: the next one finds the rest.
ciuic.maintenance.prune decides what is live.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance.chunkset import ChunkSet
from ciuic.repository import PackInfo, PackRecord, Writer
from ciuic.repository.chunk_reader import MAX_READ_BASE_DEPTH
from ciuic.repository.writing.writer import OpenRepository
from ciuic.system.disk_space import available_bytes, writable_bytes
from ciuic.types import ChunkId

# Space that a rewrite may need besides the copies themselves: a pack's own structure, the index's growth.
_REWRITE_MARGIN_BYTES = 8 << 20
# More small packs of a kind than this are merged.
_SMALL_PACK_BYTES = 16 << 20
_MAX_SMALL_PACKS = 64

StopCheck = Callable[[], bool]
Progress = Callable[[str, int, int], None]
"""Function of (what is being done, how much is done, of how much; 0 where that is not known)."""


class SweepStopped(Exception):
    """``should_stop`` returned True."""


# What is stored at one time mostly goes at one time, so most packs are wholly dead or wholly alive. Punching holes into packs would
# free dead chunks without copying, but the packs' lists would go on naming them (docs/decisions/collection.md).
@dataclass(frozen=True)
class Thresholds:
    """Shares of garbage from which on rewriting a pack is worth the copying."""

    unused_share: float = 0.05
    """Share of all stored bytes that may be garbage."""
    pack_dead_share: float = 0.2
    """Share of garbage below which a pack is left alone: copying most of it would free little."""


USUAL = Thresholds()
HURRIED = Thresholds(unused_share=0.0, pack_dead_share=0.02)
"""Thresholds for a disk that is short of space."""


@dataclass(frozen=True)
class PackUse:
    """Use of one pack, in stored bytes; the pack's own structure counts as neither live nor dead."""

    number: int
    kind: str
    size_bytes: int
    live_bytes: int
    live_chunks: int
    dead_bytes: int = 0
    sealed: bool = True

    @property
    def dead(self) -> bool:
        """True if nothing is lost with the pack. An empty pack that is still being filled is not dead."""
        return not self.live_chunks and (self.sealed or self.dead_bytes > 0)

    @property
    def dead_share(self) -> float:
        """Share of the stored bytes that nothing refers to."""
        stored_bytes = self.live_bytes + self.dead_bytes
        return self.dead_bytes / stored_bytes if stored_bytes else 0.0


@dataclass
class SweepResult:
    """Result of a sweep."""

    dropped_packs: int = 0
    rewritten_packs: int = 0
    freed_bytes: int = 0
    garbage_bytes: int = 0
    """Dead bytes that stay in packs that were not worth rewriting, or could not be rewritten."""
    stopped: bool = False
    notes: list[str] = field(default_factory=list)
    """Sentences about what was not done, and why."""


@dataclass
class Survey:
    """Use of every pack."""

    uses: list[PackUse] = field(default_factory=list)
    damaged: dict[int, Damaged] = field(default_factory=dict)
    """Packs whose list may be incomplete."""


def survey(
    repository: OpenRepository,
    live: Callable[[ChunkId], bool],
    should_stop: StopCheck | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Return the use of every pack.

    Raises:
        SweepStopped: ``should_stop`` returned True.
    """
    found = Survey()
    # The strict list: a pack of which a record is missing would seem to be dead.
    for pack, records in each_list(repository, should_stop, progress):
        if isinstance(records, Damaged):
            found.damaged[pack.number] = records
        else:
            found.uses.append(_use(pack, records, live))
    return found


def each_list(
    repository: OpenRepository,
    should_stop: StopCheck | None = None,
    progress: Progress | None = None,
    *,
    salvage: bool = False,
) -> Iterator[tuple[PackInfo, Iterator[PackRecord] | Damaged]]:
    """Yield each pack with its records, with ``salvage`` those that can be read, or the error by which the list is not whole.

    Raises:
        SweepStopped: ``should_stop`` returned True.
    """
    packs = repository.packs()
    for done, pack in enumerate(packs):
        if should_stop is not None and should_stop():
            raise SweepStopped
        if progress is not None:
            progress("reading pack tables", done, len(packs))
        try:
            yield pack, repository.pack_records(pack.number, salvage=salvage)
        except NotFound:
            # Without the lock another process may prune meanwhile: what was live in it lies in a newer pack.
            continue
        except Damaged as error:
            yield pack, error


def add_bases(
    repository: OpenRepository,
    live: Callable[[ChunkId], bool],
    add: Callable[[ChunkId], None],
    should_stop: StopCheck | None = None,
) -> None:
    """Add the bases of live chunks, from which these are stored as differences, in any copy.

    Every pack list is read once for each link of the longest chain of bases, and nothing of it is kept in memory.

    Raises:
        SweepStopped: ``should_stop`` returned True.
    """
    # A repository of format 1 has no differences: its lists need not be read.
    found = repository.may_have_bases
    # A reader follows no longer chain; a crafted one could be as long as the repository.
    for _ in range(MAX_READ_BASE_DEPTH):
        if not found:
            return
        found = False
        for _, records in each_list(repository, should_stop, salvage=True):
            if isinstance(records, Damaged):
                raise records
            for record in records:
                if record.base and live(record.id) and not live(record.base):
                    add(record.base)
                    found = True


def all_listed(repository: OpenRepository, live: Callable[[ChunkId], bool], live_chunks: int) -> bool:
    """Return whether each of the ``live_chunks`` live chunks is in the readable part of some pack's list.

    If so, the unreadable parts of damaged packs hide nothing that is needed.
    """
    listed = ChunkSet()
    for _, records in each_list(repository, salvage=True):
        if isinstance(records, Damaged):
            raise records
        for record in records:
            if live(record.id):
                listed.add(record.id)
    return len(listed) == live_chunks


def _use(pack: PackInfo, records: Iterable[PackRecord], live: Callable[[ChunkId], bool]) -> PackUse:
    live_bytes = live_chunks = dead_bytes = 0
    for record in records:
        if live(record.id):
            live_bytes += record.stored_bytes
            live_chunks += 1
        else:
            dead_bytes += record.stored_bytes
    return PackUse(pack.number, pack.kind, pack.size_bytes, live_bytes, live_chunks, dead_bytes, pack.sealed)


def worth_rewriting(uses: Sequence[PackUse], thresholds: Thresholds) -> list[PackUse]:
    """Return the packs to rewrite, those first that free most for what they copy; wholly dead packs are not among them."""
    alive = [use for use in uses if use.live_chunks]
    excess_bytes = sum(use.dead_bytes for use in alive) - thresholds.unused_share * sum(
        u.size_bytes for u in alive
    )
    chosen = []
    # The deadest first; equal ones by number, so that two runs choose the same.
    for use in sorted(alive, key=lambda use: (-use.dead_share, use.number)):
        if excess_bytes <= 0 or use.dead_share < thresholds.pack_dead_share:
            break
        chosen.append(use)
        excess_bytes -= use.dead_bytes
    # An unsealed pack comes first: the copies from the others are appended to it, and would be copied again with it.
    return sorted(chosen + _small_ones(alive, chosen), key=lambda use: use.sealed)


def _small_ones(alive: Sequence[PackUse], chosen: Sequence[PackUse]) -> list[PackUse]:
    """Return the small packs, once there are so many that opening them costs more than merging them."""
    already = {use.number for use in chosen}
    small: list[PackUse] = []
    for kind in ("data", "meta"):
        of_kind = [
            use
            for use in alive
            if use.kind == kind and use.size_bytes < _SMALL_PACK_BYTES and use.number not in already
        ]
        if len(of_kind) > _MAX_SMALL_PACKS:
            small += of_kind
    return small


def sweep(
    writer: Writer,
    live: Callable[[ChunkId], bool],
    thresholds: Thresholds = USUAL,
    *,
    live_chunks: int | None = None,
    progress: Progress | None = None,
    should_stop: StopCheck | None = None,
) -> SweepResult:
    """Drop packs that are wholly dead, and rewrite those that are worth it.

    Args:
        writer: a writer, which holds the repository's lock.
        live: whether a snapshot refers to a chunk. It must be complete: nothing else decides what is deleted.
        thresholds: which packs are worth rewriting.
        live_chunks: number of distinct live chunks; without it damaged packs stay.
        progress: called with the progress.
        should_stop: called between packs; True ends the sweep early.
    """
    result = SweepResult()
    try:
        found = survey(writer.repository, live, should_stop)
    except SweepStopped:
        result.stopped = True
        return result
    salvaged = _salvageable(writer.repository, found, live, live_chunks, result)
    # Any chunk may be the base of one that the unreadable list names.
    if found.damaged and not salvaged and writer.repository.may_have_bases:
        result.notes.append(
            "nothing is freed: a pack that cannot be listed may have chunks stored as differences from others"
        )
        return result
    # Descriptors that the survey has left open would keep the space of deleted packs allocated.
    writer.repository.close()
    # Dropping comes first: it needs no free space, and gives it to the rewriting.
    acts: list[Callable[[], bool]] = [partial(_drop, writer, use, result) for use in found.uses if use.dead]
    acts += [partial(_rewrite, writer, use, live, result, salvage=True) for use in salvaged]
    acts += [partial(_rewrite, writer, use, live, result) for use in worth_rewriting(found.uses, thresholds)]
    # Counted down as packs go: what is left at the end stays.
    result.garbage_bytes = sum(use.dead_bytes for use in (*found.uses, *salvaged))
    for done, act in enumerate(acts):
        if progress is not None:
            progress("freeing space", done, len(acts))
        if should_stop is not None and should_stop():
            result.stopped = True
            break
        if not act():
            break
    return result


def _salvageable(
    repository: OpenRepository,
    found: Survey,
    live: Callable[[ChunkId], bool],
    live_chunks: int | None,
    result: SweepResult,
) -> list[PackUse]:
    if not found.damaged:
        return []
    if live_chunks is None or not all_listed(repository, live, live_chunks):
        result.notes += [f"a pack is left unchanged: {error}" for error in found.damaged.values()]
        return []
    return [
        _use(pack, repository.pack_records(pack.number, salvage=True), live)
        for pack in repository.packs()
        if pack.number in found.damaged
    ]


def _drop(writer: Writer, use: PackUse, result: SweepResult) -> bool:
    result.freed_bytes += writer.drop_pack(use.number)
    result.garbage_bytes -= use.dead_bytes
    result.dropped_packs += 1
    return True


def _rewrite(
    writer: Writer,
    use: PackUse,
    live: Callable[[ChunkId], bool],
    result: SweepResult,
    *,
    salvage: bool = False,
) -> bool:
    """Rewrite one pack; return whether the next one may be tried."""
    # Asked before, not found out by ENOSPC: a writer that failed to store can only be closed.
    cramped = available_bytes(writer.repository.path) < use.live_bytes + _REWRITE_MARGIN_BYTES
    try:
        if not cramped:
            result.freed_bytes += writer.rewrite_pack(use.number, live, salvage=salvage)
        # A damaged pack cannot be cut from its end: its segments are not all known.
        elif salvage or not _rewrite_by_pieces(writer, use.number, live, result):
            result.notes.append(
                f"pack {use.number:016x} is not rewritten: the disk has no room for its live chunks"
            )
            return True
    except Damaged as error:
        result.notes.append(f"pack {use.number:016x} is left unchanged: {error}")
        return True
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # A writer that failed to store can only be closed; the next run continues.
        result.notes.append(f"stopped at pack {use.number:016x}: {error.strerror}")
        return False
    result.garbage_bytes -= use.dead_bytes
    result.rewritten_packs += 1
    return True


def _rewrite_by_pieces(
    writer: Writer, number: int, live: Callable[[ChunkId], bool], result: SweepResult
) -> bool:
    """Move a pack's live chunks piece by piece from its end; return whether all were moved."""
    left_bytes = None
    while left_bytes != 0:
        # The file system's reserve for root may be used: each piece is freed before the next one is copied.
        room_bytes = min(writable_bytes(writer.repository.path), _REWRITE_MARGIN_BYTES)
        shortened = writer.shorten_pack(number, live, room_bytes)
        result.freed_bytes += shortened.freed_bytes
        # No progress: the last segment does not fit.
        if shortened.left_bytes == left_bytes:
            return False
        left_bytes = shortened.left_bytes
    return True
