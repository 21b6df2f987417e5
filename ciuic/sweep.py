"""The second half of garbage collection: which packs go, which are rewritten, and the doing of it.

Guarantees: a pack goes only when nothing in it is live, and a live chunk is copied and durable before the pack it
came from goes (Writer.rewrite_pack). A pack of whose list something may be missing (an interrupted write leaves such)
goes only when every single live chunk is listed elsewhere or in what can still be read of it. Dropping comes first and
needs no free space; rewriting is done only as far as the disk has room. May be stopped between any two packs, or killed
anywhere: what is left is found again. Leaves to ciuic.gc the question of what is live.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ciuic.chunkset import ChunkSet
from ciuic.disk_space import available_bytes, writable_bytes
from ciuic.errors import Damaged, NotFound
from ciuic.repository import PackInfo, PackRecord, Repository, Writer
from ciuic.repository.chunks import MOST_BASES
from ciuic.types import ChunkId

# What a rewrite may need besides the copies themselves: a pack's own structure, the index's growth.
_REWRITE_MARGIN_BYTES = 8 << 20
_SMALL_PACK_BYTES = 16 << 20
_MANY_SMALL_PACKS = 64

StopCheck = Callable[[], bool]
Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much; 0 where that is not known)"""


class Stopped(Exception):
    """``should_stop`` said so."""


@dataclass(frozen=True)
class Thresholds:
    """When rewriting a pack is worth copying what lives in it."""

    unused_share: float = 0.05
    """So much of all stored bytes may be garbage."""
    pack_dead_share: float = 0.2
    """A pack with a smaller share of garbage is left alone: copying most of it would free little."""


USUAL = Thresholds()
HURRIED = Thresholds(unused_share=0.0, pack_dead_share=0.02)
"""When the disk is short of space."""


@dataclass(frozen=True)
class PackUse:
    """How much of one pack is still needed, in stored bytes; its own structure counts as neither live nor dead."""

    number: int
    kind: str
    size_bytes: int
    live_bytes: int
    live_chunks: int
    dead_bytes: int = 0
    sealed: bool = True

    @property
    def dead(self) -> bool:
        """Whether nothing is lost with it. The pack that is being filled is not dead because it is still empty."""
        return not self.live_chunks and (self.sealed or self.dead_bytes > 0)

    @property
    def dead_share(self) -> float:
        stored_bytes = self.live_bytes + self.dead_bytes
        return self.dead_bytes / stored_bytes if stored_bytes else 0.0


@dataclass
class SweepResult:
    """What was done to the packs."""

    dropped_packs: int = 0
    rewritten_packs: int = 0
    freed_bytes: int = 0
    garbage_bytes: int = 0
    """Dead bytes left behind in packs that were not worth rewriting, or could not be."""
    stopped: bool = False
    notes: list[str] = field(default_factory=list)
    """What was not done and why, in sentences."""


@dataclass
class Survey:
    """What is live in which pack."""

    uses: list[PackUse] = field(default_factory=list)
    damaged: dict[int, Damaged] = field(default_factory=dict)
    """Packs of whose list something may be missing."""


def survey(
    repository: Repository, live: Callable[[ChunkId], bool], should_stop: StopCheck | None = None
) -> Survey:
    """Look at every pack. Raises Stopped."""
    found = Survey()
    for pack in repository.packs():
        if should_stop is not None and should_stop():
            raise Stopped
        try:
            found.uses.append(_use(pack, repository.pack_records(pack.number), live))
        except NotFound:
            continue  # without the lock (a dry run), somebody else may collect meanwhile
        except Damaged as error:
            found.damaged[pack.number] = error
    return found


def add_bases(
    repository: Repository,
    live: Callable[[ChunkId], bool],
    add: Callable[[ChunkId], None],
    should_stop: StopCheck | None = None,
) -> None:
    """Makes live what live chunks are stored as the difference from, in whichever copy. Raises Stopped.

    Every list is read as many times as bases lie behind each other; nothing is kept of them.
    """
    found = repository.may_have_bases
    for _ in range(
        MOST_BASES
    ):  # a reader follows no longer chain, and a crafted one may be as long as the repository
        if not found:
            return
        found = False
        for pack in repository.packs():
            if should_stop is not None and should_stop():
                raise Stopped
            try:
                for record in repository.pack_records(pack.number, salvage=True):
                    if record.base and live(record.id) and not live(record.base):
                        add(record.base)
                        found = True
            except NotFound:
                continue  # without the lock (a dry run), somebody else may collect meanwhile


def all_listed(repository: Repository, live: Callable[[ChunkId], bool], live_chunks: int) -> bool:
    """Whether each of the ``live_chunks`` chunks stands in what can be read of some pack's list.

    If so, nothing that is needed hides in the unreadable part of a damaged pack.
    """
    listed = ChunkSet()
    for pack in repository.packs():
        for record in repository.pack_records(pack.number, salvage=True):
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
    """The packs to rewrite, those first that free most for what they copy; wholly dead ones are not among them."""
    alive = [use for use in uses if use.live_chunks]
    excess_bytes = sum(use.dead_bytes for use in alive) - thresholds.unused_share * sum(
        u.size_bytes for u in alive
    )
    chosen = []
    for use in sorted(alive, key=lambda use: (-use.dead_share, use.number)):
        if excess_bytes <= 0 or use.dead_share < thresholds.pack_dead_share:
            break
        chosen.append(use)
        excess_bytes -= use.dead_bytes
    # A pack that is being filled comes first, or what is copied from the others would be copied again with it.
    return sorted(chosen + _small_ones(alive, chosen), key=lambda use: use.sealed)


def _small_ones(alive: Sequence[PackUse], chosen: Sequence[PackUse]) -> list[PackUse]:
    """Small packs, once there are so many that opening them costs more than copying them together."""
    already = {use.number for use in chosen}
    small: list[PackUse] = []
    for kind in ("data", "meta"):
        of_kind = [
            use
            for use in alive
            if use.kind == kind and use.size_bytes < _SMALL_PACK_BYTES and use.number not in already
        ]
        if len(of_kind) > _MANY_SMALL_PACKS:
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
    """Drop what is wholly dead, rewrite what is worth it. ``live`` must be complete: it decides alone.

    ``live_chunks``: how many distinct chunks are live. Without it damaged packs stay.
    """
    result = SweepResult()
    try:
        found = survey(writer.repository, live, should_stop)
    except Stopped:
        result.stopped = True
        return result
    salvaged = _salvageable(writer.repository, found, live, live_chunks, result)
    if found.damaged and not salvaged and writer.repository.may_have_bases:
        result.notes.append(
            "nothing is freed: a pack that cannot be listed may need what others hold as a base"
        )
        return result
    # Descriptors that the survey has left open would keep the space of deleted packs.
    writer.repository.close()
    acts: list[Callable[[], bool]] = [partial(_drop, writer, use, result) for use in found.uses if use.dead]
    acts += [partial(_rewrite, writer, use, live, result, salvage=True) for use in salvaged]
    acts += [partial(_rewrite, writer, use, live, result) for use in worth_rewriting(found.uses, thresholds)]
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
    repository: Repository,
    found: Survey,
    live: Callable[[ChunkId], bool],
    live_chunks: int | None,
    result: SweepResult,
) -> list[PackUse]:
    if not found.damaged:
        return []
    if live_chunks is None or not all_listed(repository, live, live_chunks):
        result.notes += [f"a pack is left as it is: {error}" for error in found.damaged.values()]
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
    """Whether the next pack may be tried."""
    cramped = available_bytes(writer.repository.path) < use.live_bytes + _REWRITE_MARGIN_BYTES
    try:
        if not cramped:
            result.freed_bytes += writer.rewrite_pack(use.number, live, salvage=salvage)
        elif salvage or not _rewrite_by_pieces(writer, use.number, live, result):
            result.notes.append(
                f"pack {use.number:016x} is not rewritten: the disk has no room for what lives in it"
            )
            return True
    except Damaged as error:
        result.notes.append(f"pack {use.number:016x} is left as it is: {error}")
        return True
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # A writer that failed to store can only be closed: what is left is for the next run.
        result.notes.append(f"stopped at pack {use.number:016x}: {error.strerror}")
        return False
    result.garbage_bytes -= use.dead_bytes
    result.rewritten_packs += 1
    return True


def _rewrite_by_pieces(
    writer: Writer, number: int, live: Callable[[ChunkId], bool], result: SweepResult
) -> bool:
    """From its end on, each piece freed before the next is copied; whether it was done to the end."""
    left_bytes = None
    while left_bytes != 0:
        # What is kept for root may be used: a piece is freed before the next one is copied.
        room_bytes = min(writable_bytes(writer.repository.path), _REWRITE_MARGIN_BYTES)
        shortened = writer.shorten_pack(number, live, room_bytes)
        result.freed_bytes += shortened.freed_bytes
        if shortened.left_bytes == left_bytes:
            return False
        left_bytes = shortened.left_bytes
    return True
