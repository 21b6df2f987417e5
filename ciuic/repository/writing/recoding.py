"""Store chunks again as differences or planes, and let go the packs that have them as they are.

Guarantees: ids do not change, so snapshots and trees are not touched. The new copies are decoded and compared
before they are written, and durable before a pack goes: a process that is killed leaves one copy or both.
Which of them a reader takes makes no difference: no chunk is in its own chain of bases, and no chain is longer
than `MAX_WRITTEN_BASE_DEPTH`, whichever copies are read (delta_bases.py). So a chunk on which such a chain
rests already becomes no difference any more: every fifth state of a sequence stays without a base.

A pack is recoded as a whole or not at all. What else it has is copied, so only packs that mostly have chunks
to be recoded are touched; a caller that seals a pack after what is to be recoded together
(`Writer.seal_packs`) makes such packs. Memory: the new copies of one pack; a caller that stops the work may
keep them for its next call (`begun`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ciuic.errors import Damaged
from ciuic.repository.codecs.codec import MAX_WRITTEN_BASE_DEPTH, Codec, Coded, Pace, code, threads
from ciuic.repository.format import pack_format as pf
from ciuic.repository.index.database import DAMAGED
from ciuic.repository.model import PackRecord
from ciuic.repository.packs.chunk_reader import BadCopyError, read_copy, unpack
from ciuic.repository.writing import maintenance
from ciuic.repository.writing.delta_bases import Bases, BufferedChunk
from ciuic.types import ChunkId

if TYPE_CHECKING:
    from ciuic.repository.disk.operations import Disk
    from ciuic.repository.writing.chunk_store import ChunkStore

# Share of a pack that must be recoded: the rest is copied.
_MIN_SHARE: Final = 0.5
# Largest share of its size at which a chunk is stored again.
_MAX_CODED_SHARE: Final = 0.95
_THREADS: Final = 2
# Time between two looks at the pace.
_POLL_SECONDS: Final = 0.02


class Recoded(NamedTuple):
    """Result of `Writer.recode`."""

    chunks: int = 0
    """Number of chunks that lie in a new form now."""
    freed_bytes: int = 0
    """Bytes by which the packs have shrunk."""
    stopped: bool = False
    """True if the pace ended the work: the same call does the rest."""
    left: Sequence[ChunkId] = ()
    """Chunks that lie as they are because their packs are mostly of others, or too small."""


Begun = MutableMapping[ChunkId, Coded | None]
"""Coded content by chunk, where the pace ended the work on its pack; None if it does not become smaller."""
_Waiting = deque[tuple[ChunkId, int, Future[Coded | None]]]
"""Chunks that are being coded, with their sizes."""


def recode(
    disk: Disk,
    store: ChunkStore,
    wanted: Mapping[ChunkId, Codec],
    pace: Callable[[], Pace],
    begun: Begun,
    min_pack_bytes: int,
) -> Recoded:
    """Recode chunks; see `Writer.recode`."""
    by_pack: dict[int, list[ChunkId]] = defaultdict(list)
    for chunk in wanted:
        for copy in store.find(chunk):
            # A copy that is coded already is left alone, and so is one that is marked as damaged.
            if not copy.flags:
                by_pack[copy.pack].append(chunk)
    chunks = freed_bytes = 0
    left: list[ChunkId] = []
    for number, plain in sorted(by_pack.items()):
        if not _mostly(store, number, plain, min_pack_bytes):
            left += plain
            continue
        coded = _code_all(store, {chunk: wanted[chunk] for chunk in plain}, pace, begun)
        if coded is None:
            return Recoded(chunks, freed_bytes, stopped=True)
        # A chain whose dependents the index has lost could become longer than readers follow.
        if not store.index.tells_all:
            break
        if coded and _mostly(store, number, list(coded)):
            freed_bytes += _replace(disk, store, number, coded)
            chunks += len(coded)
        for chunk in plain:
            begun.pop(chunk, None)
    return Recoded(chunks, freed_bytes, left=left)


class _NewCopy(NamedTuple):
    """Coded content; no stored bytes where a good coded copy lies in another pack."""

    raw_bytes: int
    coded: Coded | None


def _mostly(store: ChunkStore, number: int, chunks: Sequence[ChunkId], min_pack_bytes: int = 0) -> bool:
    """Return whether these chunks are most of the pack, which is one of data, sound and of some size."""
    try:
        if store.packs.kind(number) != "data":
            return False
        records = store.packs.strict_records(number)
    # A damaged pack is left to check and prune.
    except Damaged:
        return False
    ours = set(chunks)
    own_bytes = sum(record.stored_bytes for record in records if record.id in ours)
    all_bytes = sum(record.stored_bytes for record in records)
    return own_bytes >= _MIN_SHARE * all_bytes and all_bytes >= min_pack_bytes


def _replace(disk: Disk, store: ChunkStore, number: int, copies: Mapping[ChunkId, _NewCopy]) -> int:
    """Store the new copies, then let the pack go; return the bytes freed."""
    # First, so that nothing is appended to the pack that goes.
    maintenance.release_pack(store, number)
    size_before = store.grown_bytes
    for chunk, (raw_bytes, coded) in copies.items():
        if coded is not None:
            record = PackRecord(
                chunk, 0, len(coded.stored), raw_bytes, coded.flags, pf.checksum(coded.stored), coded.base
            )
            store.append(record, coded.stored, "data")
    # What is copied goes into another pack, of which it is most when it is to be recoded itself.
    store.sync()
    store.appenders["data"].seal(1)
    grown_bytes = store.grown_bytes - size_before
    # The rewrite syncs what was appended here with what it copies, before the pack goes.
    freed = maintenance.rewrite_pack(disk, store, number, lambda chunk: chunk not in copies, salvage=False)
    return freed - grown_bytes


def _code_all(
    store: ChunkStore, wanted: Mapping[ChunkId, Codec], pace: Callable[[], Pace], begun: Begun
) -> dict[ChunkId, _NewCopy] | None:
    """Return the new copies of the chunks that become smaller; None if the pace ended the work."""
    found: dict[ChunkId, _NewCopy] = {}
    # What may get a base here, which the index does not know yet: its chain is not known.
    undecided = _Undecided()
    bases = Bases(store.packs, undecided.buffered, store.find, store.identity)
    waiting: _Waiting = deque()
    with ExitStack() as last:
        last.callback(bases.close)
        # After the pools: what they were at when the work ended counts too.
        last.callback(_keep_finished, waiting, begun)
        pools = _Pools()
        last.callback(pools.close)
        for chunk, codec in wanted.items():
            while len(waiting) >= 2 * _THREADS:
                if not _take(waiting, found, begun, pace):
                    return None
            if (now := pace()) == "now":
                return None
            copies = store.find(chunk)
            # The index has lost it since.
            if not copies:
                continue
            if _has_coded_copy(store, chunk):
                found[chunk] = _NewCopy(copies[0].raw_bytes, None)
                continue
            longest = MAX_WRITTEN_BASE_DEPTH - _height(store, chunk, undecided)
            usable = bases.found(chunk, copies[0].raw_bytes, codec, max_length=longest)
            undecided.add(chunk, usable)
            if chunk in begun and _rests_on_usable(begun[chunk], usable):
                _note(found, chunk, copies[0].raw_bytes, begun[chunk])
                continue
            try:
                content = store.get(chunk)
            # Nothing is stored instead of what cannot be read.
            except Damaged:
                continue
            waiting.append((chunk, len(content), pools.submit(content, usable, patient=now == "patient")))
        while waiting:
            if not _take(waiting, found, begun, pace):
                return None
    return found


def _take(waiting: _Waiting, found: dict[ChunkId, _NewCopy], begun: Begun, pace: Callable[[], Pace]) -> bool:
    """Wait for the oldest chunk; return False if the pace ended the work before."""
    chunk, raw_bytes, future = waiting[0]
    while pace() != "now":
        with suppress(TimedOut):
            begun[chunk] = future.result(_POLL_SECONDS)
            waiting.popleft()
            _note(found, chunk, raw_bytes, begun[chunk])
            return True
    return False


def _note(found: dict[ChunkId, _NewCopy], chunk: ChunkId, raw_bytes: int, coded: Coded | None) -> None:
    if coded is not None:
        found[chunk] = _NewCopy(raw_bytes, coded)


def _keep_finished(waiting: _Waiting, begun: Begun) -> None:
    """Keep what was coded and not taken."""
    for chunk, _, future in waiting:
        if future.done() and not future.cancelled() and future.exception() is None:
            begun[chunk] = future.result()


def _rests_on_usable(coded: Coded | None, usable: Codec) -> bool:
    """Return whether coded content may still be stored: its base may have gone since, or its chain grown."""
    return coded is None or coded.base in (b"", usable.base, usable.twin and usable.twin.base)


def _has_coded_copy(store: ChunkStore, chunk: ChunkId) -> bool:
    """Return whether a good copy is coded already: a process was killed before it let the old pack go."""
    for copy in store.find(chunk):
        if copy.flags and not copy.flags & DAMAGED:
            with suppress(BadCopyError):
                read_copy(store.packs, copy, chunk, store.identity, store.get)
                return True
    return False


def _height(store: ChunkStore, chunk: ChunkId, undecided: _Undecided) -> int:
    """Return the length of the longest chain of differences that rests on a chunk, in any copies."""
    layer = {chunk}
    for height in range(MAX_WRITTEN_BASE_DEPTH):
        layer = store.index.direct_dependents_of(layer) | undecided.dependents_of(layer)
        if not layer:
            return height
    return MAX_WRITTEN_BASE_DEPTH


class _Undecided:
    """Chunks that may get a base."""

    def __init__(self) -> None:
        self._chunks: set[ChunkId] = set()
        self._dependents: dict[ChunkId, set[ChunkId]] = defaultdict(set)

    def add(self, chunk: ChunkId, codec: Codec) -> None:
        for base in (codec.base, codec.twin and codec.twin.base):
            if base:
                self._chunks.add(chunk)
                # Either may be taken: the chunk counts as if it rested on both.
                self._dependents[base].add(chunk)

    def buffered(self, chunk: ChunkId) -> BufferedChunk | None:
        """Return a chunk that is no base for others."""
        return BufferedChunk(b"", 0, 0, b"", undecided=True) if chunk in self._chunks else None

    def dependents_of(self, chunks: set[ChunkId]) -> set[ChunkId]:
        return {above for chunk in chunks for above in self._dependents.get(chunk, ())}


class _Pools:
    """Threads that code: patient ones (True) and others."""

    def __init__(self) -> None:
        self._pools: dict[bool, ThreadPoolExecutor] = {}

    def submit(self, content: bytes, codec: Codec, *, patient: bool) -> Future[Coded | None]:
        if patient not in self._pools:
            self._pools[patient] = threads(_THREADS, patient=patient)
        return self._pools[patient].submit(_coded, content, codec)

    def close(self) -> None:
        """Wait for running jobs, which are short."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)


def _coded(content: bytes, codec: Codec) -> Coded | None:
    """Return content coded and decoded again; None if it does not become smaller."""
    base = codec.read_base() if codec.base else None
    coded = code(content, codec._replace(base=codec.base if base else None, read_base=lambda: base))
    if len(coded.stored) > _MAX_CODED_SHARE * len(content):
        return None
    if coded.kind == "twin":
        base = codec.twin.read() if codec.twin else None
    # The only copy goes when this one is there.
    if unpack(coded.stored, len(content), coded.flags, base=base if coded.base else None) != content:
        raise AssertionError(f"content coded as {coded.kind} does not come back")
    return coded
