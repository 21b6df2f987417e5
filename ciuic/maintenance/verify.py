"""Verify that snapshots can be restored: every tree, block map and chunk exists and, on request, every byte is right.

Guarantees: damage is reported with path, block and all snapshots that share it, and never ends the search. Each chunk is read
once, however many snapshots refer to it. A commit that a writer makes meanwhile is never taken for damage: where index and packs
cannot be told apart from one, nothing is reported. `ciuic.maintenance.check` checks the consistency of the repository itself.

By a sample, all of the structure is read, and each block with the probability that the caller names, independently of the others:
damage that covers n blocks is missed with the probability (1 - share)^n.

In slices (`--max-duration`), each continues where the one before it stopped. One *pass* reads every pack, lowest number first, then
checks that every snapshot has all its chunks. Numbers grow and are never used again, so packs that are added meanwhile are read at
the end of the pass, and removed packs are not missed. Damage is reported before the state file counts its pack or snapshot as
verified, so a slice that is killed hides none. When its time is up, a slice ends after the pack or snapshot that it is reading. One
scrub runs at a time (a lock on the state file `scrub`, which lies beside the repository's own files and is no part of the
repository). A state that is torn, that another version wrote or that belongs to another repository begins a new pass, because an
extra pass does no harm.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from ciuic.errors import Busy, CiuicError, Damaged, NotFound, NotPermitted
from ciuic.maintenance.chunkset import NeededChunks
from ciuic.maintenance.references import MAX_REPEATS, ChunkReference, ReferenceFinder
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.errors import Archived, DamagedTree
from ciuic.repository.lookup import resolve
from ciuic.repository.model import LOCK_NAME, ChunkLocation, PackDamage
from ciuic.repository.snapshot_walk import Reached
from ciuic.repository.snapshots import UNREADABLE_MARKS
from ciuic.restore.content import BlockWorker
from ciuic.restore.pool import Pool
from ciuic.structs import decode_json
from ciuic.system.disk import open_locked, open_regular, try_lock
from ciuic.types import ChunkId, Entry, RootRecord, Snapshot, SnapshotId

# Comparisons that a commit may disturb before the result is given up as unknown.
_MAX_ATTEMPTS: Final = 5
NOT_COVERED: Final = "the index does not cover"
"""Beginning of the repository's message for an index that is missing, or behind the packs after a crash or beside a writer.

It is no damage: readers find those chunks without the index.
"""


def index_problems(repository: Repository) -> list[str] | None:
    """Return the differences between index and packs; None when a writer is changing them."""
    # A commit may begin right after the check for a writer, so the packs must have the same sizes after the comparison.
    for _ in range(_MAX_ATTEMPTS):
        if _writer_at_work(repository):
            return None
        before = repository.pack_sizes()
        problems = repository.check_index()
        if not problems or (not _writer_at_work(repository) and repository.pack_sizes() == before):
            return problems
    return None


def _writer_at_work(repository: Repository) -> bool:
    """Return whether a writer holds the repository's lock, so that the index may be changing."""
    try:
        fd = open_regular(repository.path / LOCK_NAME, os.O_RDONLY)
    except OSError:
        # No lock file, or the caller may not open it: a writer cannot be seen.
        return False
    try:
        # Shared: two checks at once do not take each other for a writer.
        return not try_lock(fd, shared=True)
    except OSError:
        # A file system without locks.
        return False
    finally:
        os.close(fd)


# Up to this size the whole repository is read for one snapshot, too: it takes seconds, and finds damage in unused chunks.
_MAX_WHOLE_BYTES = 1 << 30
# Chunks of a task: enough that handing it over costs little beside reading them.
_BATCH_CHUNKS = 256
# Snapshots that `verify_each` reads at once: each waits for a store most of the time.
_AT_ONCE: Final = 8
# Ids in the reason of another chunk's damage: the bases that it is stored as a difference from.
_CHUNK = re.compile(r"(?<=chunk )[0-9a-f]{32}")

DamageKind = Literal["snapshot", "tree", "links", "map", "xattrs", "data", "pack", "index", "config"]


class Damage(NamedTuple):
    """A damage, in a snapshot's content (`path` is set) or in the repository itself (`file` is set)."""

    kind: DamageKind
    reason: str
    path: bytes = b""
    """Absolute path of the file or directory."""
    root: bytes = b""
    block: int = -1
    """Block number in the file, or -1."""
    offset: int = -1
    """Byte offset of that block in the file, or -1."""
    chunk: ChunkId | None = None
    snapshots: tuple[SnapshotId, ...] = ()
    """All snapshots that share it, newest first."""
    file: str = ""
    """Own file of the repository, if it is known."""


class VerifyProgress(NamedTuple):
    """Progress of a verification."""

    bytes_done: int
    bytes_total: int
    """Bytes to be read; 0 while unknown."""
    files_done: int
    path: bytes


@dataclass
class VerifyResult:
    """Result of a verification: what was read and which damage was found."""

    snapshots: list[SnapshotId] = field(default_factory=list)
    checksum: bool = False
    damages: list[Damage] = field(default_factory=list)
    elsewhere: list[Damage] = field(default_factory=list)
    """Damage that was met besides, and that the verified snapshots do not need to be whole."""
    files: int = 0
    """Number of names of non-directories that were verified, each shared subtree once."""
    chunks: int = 0
    bytes_read: int = 0
    """Bytes of content that were read and hashed; 0 without checksum."""
    index_missing: bool = False
    """True if a repository with packs has no index. No damage: the next writer makes it again."""

    @property
    def damaged(self) -> bool:
        """True if damage was found in what was to be verified."""
        return bool(self.damages)


def verify_snapshots(
    repository: Repository,
    ids: Sequence[SnapshotId] | None = None,
    *,
    checksum: bool = False,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> VerifyResult:
    """Verify these snapshots, or with None all of them. Damage is returned, never raised.

    With ``checksum`` every byte that they need is read. With None, or in a small repository, every byte of the packs is read,
    needed or not; what these snapshots do not need is then reported apart, as ``elsewhere``.

    Raises:
        NotFound: a snapshot does not exist.
    """
    return Verification(repository, checksum, progress).run(ids)


def verify_each(
    repository: Repository, ids: Collection[SnapshotId], *, checksum: bool = False
) -> Iterator[tuple[SnapshotId, VerifyResult | CiuicError]]:
    """Verify snapshots each for itself, a few at a time, and yield the result of each, or the error that ended it; in any order.

    The packs are listed once for all. With ``checksum`` every byte that they need is read, and no other: this is no scrub.
    """
    sizes = repository.pack_sizes() if ids else {}

    def verified(id_: SnapshotId) -> VerifyResult | CiuicError:
        # Of its own: what it remembers of trees goes with it.
        with closing(repository.reopen()) as own:
            try:
                return Verification(own, checksum, None, pack_sizes=sizes).run([id_])
            except CiuicError as error:
                # The others may be sound.
                return error

    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="verify")
    try:
        futures = {pool.submit(verified, id_): id_ for id_ in ids}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Verification:
    """A verification: first find bad chunks, then name the files that they belong to. `verify_slice` does it in parts."""

    def __init__(
        self,
        repository: Repository,
        checksum: bool,
        progress: Callable[[VerifyProgress], None] | None,
        between: Callable[[], None] = lambda: None,
        *,
        pack_sizes: Mapping[int, int] | None = None,
    ) -> None:
        """Take the repository; with ``pack_sizes``, as the caller has listed them, nothing but the content of snapshots is read."""
        self._between = between
        self._listed = pack_sizes
        self.repository = repository
        self.result = VerifyResult(checksum=checksum)
        self._progress = progress
        self._bad: dict[ChunkId, str] = {}
        """Chunks without a good copy, with the reason."""
        self._met: set[ChunkId] = set()
        """Those of them that the verified snapshots refer to, as far as verifying these has met them."""
        self._bytes_total = 0
        self._batch: list[tuple[ChunkId, int]] = []
        """Chunks to be read, each with the length that it must have."""
        self._sought: list[tuple[ChunkId, int]] = []
        """Chunks to be looked up, likewise."""
        self._pack_bytes: Mapping[int, int] = {}
        self._index_covers_all = False
        self._files: dict[ChunkId, str] = {}
        """Pack file of each bad chunk that was searched for; empty if none was found."""
        self.lengths: dict[ChunkId, int] = {}
        """Lengths of the bad blocks of files."""
        # Fingerprints take 11 to 16 bytes an id instead of 98; one false "seen" in 10^12 leaves a chunk unverified.
        self.reached = NeededChunks()
        """Chunks that the verified snapshots refer to."""
        self.is_complete = True
        """False once a snapshot, or a node of one, could not be read: what it needs is not known then."""

    def run(self, ids: Sequence[SnapshotId] | None) -> VerifyResult:
        """Verify these snapshots, or with None all of them."""
        snapshots = self._load(
            self.repository.snapshots.ids() if ids is None else ids, are_named=ids is not None
        )
        self._verify_snapshots(snapshots, read=self._verify_files(ids))
        self._report_damage()
        self._set_apart(ids)
        self._show_progress(b"")
        return self.result

    def _verify_files(self, ids: Sequence[SnapshotId] | None) -> bool:
        """Verify the repository's own files as far as was asked; return whether the chunks of the snapshots have to be read besides."""
        whole = self._listed is None and (self.result.checksum or ids is None)
        if whole:
            self._verify_repository_files()
        scrubbed = (
            whole
            and self.result.checksum
            and (ids is None or self.repository.stored_bytes() <= _MAX_WHOLE_BYTES)
        )
        if scrubbed:
            self._scrub()
        # The scrub reads what the index covers; if that is not all, the chunks of snapshots are read one by one. Likewise where it
        # found damage and some snapshots are asked about: a damaged table hides chunks from it.
        trusted = self._index_covers_all and (ids is None or not (self._bad or self.result.damages))
        return self.result.checksum and not (scrubbed and trusted)

    def _set_apart(self, ids: Sequence[SnapshotId] | None) -> None:
        """Move damage that these snapshots do not touch to ``elsewhere``."""
        if ids is None:
            return
        asked, found = set(ids), self.result.damages
        named = {damage.chunk for damage in found if asked & set(damage.snapshots)}
        # A snapshot that names no file of a chunk that it needs, because its trees are damaged, too, is no whole one.
        nameless = self._met - named
        self.result.damages, self.result.elsewhere = [], []
        for damage in found:
            is_own = bool(asked & set(damage.snapshots)) or damage.chunk in nameless
            (self.result.damages if is_own else self.result.elsewhere).append(damage)

    def _load(self, ids: Sequence[SnapshotId], *, are_named: bool) -> list[Snapshot]:
        """Return these snapshots; those that somebody named must be there."""
        loaded = []
        for id_ in dict.fromkeys(ids):
            self.result.snapshots.append(id_)
            try:
                loaded.append(self.repository.snapshots.load(id_))
            except NotFound:
                # One that was removed since all were listed needs no verdict.
                if are_named:
                    raise
                self.result.snapshots.remove(id_)
            except CiuicError as error:
                self._unreadable(str(id_), error.message)
        return loaded

    def _unreadable(self, name: str, reason: str) -> None:
        self.is_complete = False
        file = self.repository.snapshots.path(name)
        damage = Damage("snapshot", reason, snapshots=(SnapshotId(name),), file=file)
        # Loading the snapshots and reading the repository's files may both find it.
        if all(known.file != file for known in self.result.damages):
            self.result.damages.append(damage)

    # -- the repository's own files

    def _verify_repository_files(self) -> None:
        self.result.index_missing = self.repository.lacks_index()
        for words in self.repository.config_damage():
            self.result.damages.append(Damage("config", words, file=str(self.repository.path)))
        self._verify_snapshot_files()
        if self.result.checksum:
            problems = index_problems(self.repository)
            self._index_covers_all = problems == []
            for words in problems or []:
                if not words.startswith(NOT_COVERED):
                    file = str(self.repository.path / "index.sqlite")
                    self.result.damages.append(Damage("index", words, file=file))

    def _verify_snapshot_files(self) -> None:
        for unreadable in self.repository.snapshots.unreadable():
            self._unreadable(unreadable.id, unreadable.reason)
        for id_ in self.repository.snapshots.ids():
            try:
                snapshot = self.repository.snapshots.load(id_)
            except CiuicError:
                # Reported above, or removed meanwhile.
                continue
            if snapshot.hold_reason == UNREADABLE_MARKS:
                file = self.repository.snapshots.marks_path(id_)
                self.result.damages.append(Damage("snapshot", UNREADABLE_MARKS, snapshots=(id_,), file=file))

    def _scrub(self, *, after: int = -1, goes_on: Callable[[int], bool] = lambda number: True) -> None:
        """Read every byte of every pack. A bad chunk with a good copy elsewhere is damage of the pack alone."""
        skipped = sum(size for number, size in self.repository.pack_sizes().items() if number <= after)

        def progress(done: int, total: int) -> None:
            self.result.bytes_read, self._bytes_total = max(0, done - skipped), max(0, total - skipped)
            self._show_progress(b"")

        scrub = self.repository.scrub(progress, after=after, goes_on=goes_on, between=self._between)
        for found in scrub:
            self._pack_damaged(found)

    def _pack_damaged(self, found: PackDamage) -> bool:
        """Note what the scrub found; return False for a copy that a repair has marked as bad: a nightly scrub must not alarm for ever."""
        where = f"at offset {found.offset}: {found.reason}"
        file = self.repository.pack_path(found.pack)
        if found.chunk is None:
            self.result.damages.append(Damage("pack", where, file=file))
            return True
        # Read through the index, which finds another copy if there is one.
        try:
            self.repository.chunks.get(found.chunk)
        except (Damaged, Archived) as error:
            self._bad.setdefault(found.chunk, error.message)
            return True
        if self.repository.is_spent_copy(found):
            return False
        reason = f"{where}; another copy of this chunk is good"
        self.result.damages.append(Damage("pack", reason, chunk=found.chunk, file=file))
        return True

    # -- what snapshots need

    def _verify_snapshots(
        self,
        snapshots: list[Snapshot],
        *,
        read: bool,
        goes_on: Callable[[SnapshotId], bool] = lambda id_: True,
    ) -> None:
        walker = self.reached.walker(self.repository)
        self._pack_bytes = self.repository.pack_sizes() if self._listed is None else self._listed
        if read:
            self._bytes_total = sum(snapshot.size_bytes for snapshot in snapshots)
        pool = Pool(self.repository)
        with pool.deferring_interrupts(), closing(pool):
            try:
                for snapshot in snapshots:
                    for reached in walker.walk(snapshot, on_damage=self._node_damaged):
                        pool.check()
                        self._verify_chunk(snapshot, reached, pool if read else None)
                    # Before the snapshot counts as verified.
                    self._look_up()
                    if not goes_on(snapshot.id):
                        break
                self._read_batch(pool)
                pool.wait(pool.idle)
            except BaseException:
                # Otherwise `close` would wait until every queued chunk is read.
                pool.stop()
                raise

    def _node_damaged(self, reached: Reached, error: Damaged) -> None:
        self.is_complete = False
        self._meet(reached.id, error.message)

    def _meet(self, chunk: ChunkId, reason: str) -> None:
        """Note a bad chunk that a verified snapshot refers to."""
        self._bad.setdefault(chunk, reason)
        self._met.add(chunk)

    def _verify_chunk(self, snapshot: Snapshot, reached: Reached, pool: Pool | None) -> None:
        self.result.chunks += 1
        try:
            if reached.kind in ("tree", "links"):
                self._verify_node(snapshot, reached)
            elif reached.kind == "xattrs" and reached.entry is not None:
                self.repository.trees.xattrs(reached.entry)
            elif reached.kind == "data" and reached.entry is not None:
                self._verify_data(reached.id, self._length(reached), pool)
        except Damaged as error:
            self._meet(getattr(error, "chunk", reached.id), error.message)

    def _verify_node(self, snapshot: Snapshot, reached: Reached) -> None:
        self._between()
        trees, links = self.repository.trees, reached.kind == "links"
        try:
            node = trees.node(reached.id, links=links)
        except Damaged:
            # The walk reports the same node itself.
            return
        for ref in node.refs:
            trees.child(node, ref, links=links)
        for entry in node.entries:
            if not entry.is_dir and not links:
                self.result.files += 1
            if entry.link and not links:
                self._verify_link(snapshot, reached, entry)
        self._show_progress(b"")

    def _verify_link(self, snapshot: Snapshot, reached: Reached, entry: Entry) -> None:
        """Check that the inode is in the link table of one of the roots; the walk does not say of which."""
        problems = []
        for root in snapshot.roots:
            problem = self._link_problem(root, entry)
            if not problem:
                return
            problems.append(problem)
        self._meet(reached.id, f"inode {entry.link}: {problems[-1]}")

    def _link_problem(self, root: RootRecord, entry: Entry) -> str:
        try:
            resolve(self.repository, root, entry)
        except Damaged as error:
            # A damaged node of the table is reported by the walk; only missing inodes count here.
            return "" if hasattr(error, "chunk") else error.message
        return ""

    def _length(self, reached: Reached) -> int:
        assert reached.entry is not None
        block_size = self.repository.block_size
        if not 0 <= reached.block < blocks_of(reached.entry.size_bytes, block_size):
            raise DamagedTree(reached.id, f"block {reached.block} lies beyond the end of the file")
        return min(block_size, reached.entry.size_bytes - reached.block * block_size)

    def _verify_data(self, chunk: ChunkId, length: int, pool: Pool | None) -> None:
        if chunk in self._bad:
            self.lengths[chunk] = length
        if pool is None:
            self._sought.append((chunk, length))
            if len(self._sought) == _BATCH_CHUNKS:
                self._look_up()
            return
        self._batch.append((chunk, length))
        if len(self._batch) == _BATCH_CHUNKS:
            self._read_batch(pool)

    def _look_up(self) -> None:
        """Check that the chunks that wait for it are there and have the right lengths: one query for all of them."""
        sought, self._sought = self._sought, []
        if not sought:
            return
        found = self.repository.bulk.locate([chunk for chunk, _ in sought])
        for chunk, length in sought:
            location = found.get(chunk)
            # A difference needs its bases, too.
            if location is None or location.base or location.raw_bytes != length or not self._fits(location):
                try:
                    self._look_up_alone(chunk, length)
                except Damaged as error:
                    self.lengths[chunk] = length
                    self._meet(getattr(error, "chunk", chunk), error.message)

    def _look_up_alone(self, chunk: ChunkId, length: int) -> None:
        located = self.repository.chunks.locate_all(chunk)
        raw_bytes = located[0].raw_bytes
        if not all(map(self._fits, located)):
            # Only a search finds whether there is another copy.
            raw_bytes = len(self.repository.chunks.get(chunk))
        if raw_bytes != length:
            raise DamagedTree(chunk, f"a block of {length} bytes has {raw_bytes}")

    def _fits(self, location: ChunkLocation) -> bool:
        """Return whether the position that the index names lies in its pack."""
        return location.offset + location.stored_bytes <= self._pack_bytes.get(location.pack, 0)

    def _read_batch(self, pool: Pool) -> None:
        batch, self._batch = self._batch, []
        if batch:
            pool.submit(partial(self._read, pool, batch))

    def _read(self, pool: Pool, batch: list[tuple[ChunkId, int]], worker: BlockWorker) -> None:
        for chunk, length in batch:
            worker.check()
            problem = ""
            try:
                data = worker.repository.chunks.get(chunk)
                if len(data) != length:
                    problem = f"a block of {length} bytes has {len(data)}"
            except Damaged as error:
                problem = error.message
            except Archived:
                continue  # its packs are counted where they are read
            # Several threads report here: the pool's lock guards the result.
            with pool.changed:
                self.result.bytes_read += length
                if problem:
                    self.lengths[chunk] = length
                    self._meet(chunk, problem)
        with pool.changed:
            self._show_progress(b"")

    # -- names

    def _report_damage(self) -> None:
        """Turn bad chunks into damage: each reference once, with all snapshots of the repository that have it."""
        if not self._bad:
            return
        finder = ReferenceFinder(self.repository, self._bad)
        sharing: dict[ChunkReference, list[SnapshotId]] = {}
        for id_ in self.repository.snapshots.ids():
            try:
                snapshot = self.repository.snapshots.load(id_)
            except CiuicError:
                # Reported already, or removed meanwhile.
                continue
            for place in self._places(finder, snapshot):
                sharing.setdefault(place, []).append(id_)
            if finder.cut_short:
                reason = f"it refers to the same damaged nodes more than {MAX_REPEATS} times: not all affected files are listed"
                self.result.damages.append(Damage("snapshot", reason, snapshots=(id_,)))
        needed = set()
        for (kind, root, path, block, chunk), ids in sharing.items():
            needed.add(chunk)
            offset = block * self.repository.block_size if block >= 0 else -1
            self.result.damages.append(
                Damage(
                    _kind(kind),
                    self._bad[chunk],
                    path,
                    root,
                    block,
                    offset,
                    chunk,
                    tuple(ids),
                    self._file(chunk),
                )
            )
        bases = {word for chunk in needed for word in _CHUNK.findall(self._bad[chunk])}
        for chunk, reason in self._bad.items():
            if chunk not in needed:
                is_base = chunk.hex() in bases
                if not (is_base or self._file(chunk)):
                    # In no pack, and of no snapshot: it went with one that was removed during the verification.
                    continue
                whose = "others are stored as differences from it" if is_base else "no snapshot needs it"
                reason = f"{reason}; {whose}"
                self.result.damages.append(Damage("pack", reason, chunk=chunk, file=self._file(chunk)))

    def _places(self, finder: ReferenceFinder, snapshot: Snapshot) -> list[ChunkReference]:
        """Return the references in a snapshot. Damage met for the first time, in a snapshot not verified, joins the search."""
        while True:
            try:
                return list(dict.fromkeys(finder.references(snapshot)))
            except Damaged as error:
                chunk = getattr(error, "chunk", None)
                if chunk is None or chunk in self._bad:
                    return []
                self._bad[chunk] = error.message
                finder.forget()

    def _file(self, chunk: ChunkId) -> str:
        """Return the pack file that should have the chunk; empty if there is none."""
        known = self._files.get(chunk)
        # Cached, because a missing chunk is searched for in all packs, and may be missing in many files.
        if known is None:
            try:
                known = self.repository.pack_path(self.repository.chunks.locate(chunk).pack)
            except CiuicError:
                known = ""
            self._files[chunk] = known
        return known

    def _show_progress(self, path: bytes) -> None:
        if self._progress is not None:
            done = self.result.bytes_read
            self._progress(VerifyProgress(done, max(self._bytes_total, done), self.result.files, path))


def _kind(kind: str) -> DamageKind:
    return next(name for name in get_args(DamageKind) if name == kind)


def verify_sample(
    repository: Repository,
    ids: Sequence[SnapshotId] | None,
    share: float,
    *,
    rng: random.Random | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> VerifyResult:
    """Verify these snapshots, or with None all of them. Damage is returned, never raised.

    Args:
        repository: Open repository.
        ids: Snapshots.
        share: Share of the blocks that are read, from 0 to 1.
        rng: Chooses the blocks.
        progress: Called with the progress.

    Raises:
        NotFound: a snapshot does not exist.
    """
    return _Sample(repository, share, rng or random.Random(), progress).run(ids)


class _Sample(Verification):
    """Verification that reads some blocks, and looks the others up."""

    def __init__(
        self,
        repository: Repository,
        share: float,
        rng: random.Random,
        progress: Callable[[VerifyProgress], None] | None,
    ) -> None:
        def shown(state: VerifyProgress) -> None:
            if progress is not None:
                progress(state._replace(bytes_total=int(share * state.bytes_total)))

        super().__init__(repository, False, shown)
        self._share = share
        self._rng = rng

    def _verify_files(self, ids: Sequence[SnapshotId] | None) -> bool:
        if ids is None:
            self._verify_repository_files()
        return True

    def _verify_data(self, chunk: ChunkId, length: int, pool: Pool | None) -> None:
        super()._verify_data(chunk, length, pool if self._rng.random() < self._share else None)


NAME: Final = "scrub"
_VERSION: Final = 1
_MAX_BYTES: Final = 64 << 20


class Pass(msgspec.Struct):
    """Progress of a pass: packs up to ``last_pack`` are read, and all chunks of the snapshots in ``checked`` were looked up."""

    version: int = _VERSION
    repository: str = ""
    began_ns: int = 0
    """Wall-clock time of its begin; 0: none has begun, or the last one is complete."""
    last_pack: int = -1
    bytes_read: int = 0
    checked: list[str] = []
    damages: int = 0
    """Number of damages found in this pass, earlier slices included."""
    completed_ns: int = 0
    """Wall-clock time at which the last complete pass ended; 0: there was none."""


class ScrubBook:
    """The locked state file, as a context manager. The caller changes ``state`` and writes it with `save`.

    Raises:
        Busy: another scrub is running.
        NotPermitted: the file may not be written.
        CiuicError: the file cannot be written.
    """

    def __init__(self, repository: Path, repository_id: str) -> None:
        self.path = repository / NAME
        try:
            # Not the repository's lock: writers go on while a scrub reads.
            self._fd = open_locked(self.path)
        except BlockingIOError as error:
            raise Busy(
                f"another scrub of {repository} is running", hint="wait for it to end, or stop it"
            ) from error
        except PermissionError as error:
            raise NotPermitted(
                f"{self.path} is not writable: a scrub in slices stores its progress there",
                hint="run it as root, or without --max-duration",
            ) from error
        except OSError as error:
            raise CiuicError(
                f"{self.path} cannot be written: {error.strerror}", hint="run it without --max-duration"
            ) from error
        self.state = self._read(repository_id)

    def begin(self, now_ns: int) -> None:
        """Begin a new pass."""
        self.state = Pass(
            repository=self.state.repository, began_ns=now_ns, completed_ns=self.state.completed_ns
        )

    def complete(self, now_ns: int) -> None:
        """Mark the pass as complete."""
        self.state.completed_ns, self.state.began_ns = now_ns, 0

    def save(self) -> None:
        """Write the state. Without a sync: a file that is torn after a crash is not believed, and a new pass begins."""
        data = msgspec.json.encode(self.state)
        # In place, not by a rename: the lock is on this very file.
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def _read(self, repository_id: str) -> Pass:
        nothing = Pass(repository=repository_id)
        try:
            state = decode_json(os.pread(self._fd, _MAX_BYTES, 0), Pass)
        except (OSError, msgspec.DecodeError):
            return nothing
        return state if (state.version, state.repository) == (_VERSION, repository_id) else nothing

    def __enter__(self) -> ScrubBook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def verify_slice(
    repository: Repository,
    book: ScrubBook,
    *,
    time_is_up: Callable[[], bool],
    between: Callable[[], None] = lambda: None,
    progress: Callable[[VerifyProgress], None] | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> VerifyResult:
    """Continue the pass in ``book``, or begin one; a whole pass equals `verify_snapshots` of all snapshots with ``checksum``.

    Args:
        repository: the open repository.
        book: the locked state; `book.state` has the progress afterwards.
        time_is_up: called after each pack and each snapshot; True ends the slice.
        between: called often, so that the caller can pause.
        progress: called with the progress.
        now_ns: wall clock.
    """
    return _Slice(repository, True, progress, between).go_on(book, time_is_up, now_ns)


class _Slice(Verification):
    """Verification that notes its progress in the state file."""

    def go_on(
        self, book: ScrubBook, time_is_up: Callable[[], bool], now_ns: Callable[[], int]
    ) -> VerifyResult:
        """Verify until the pass ends or the time is up; see `verify_slice`."""
        if not book.state.began_ns:
            book.begin(now_ns())
            self._verify_repository_files()
        state, over = book.state, False

        def noted() -> bool:
            """Note the progress, but not beyond damage that was not reported yet: a kill would hide it."""
            nonlocal over
            if not self._bad and not self.result.damages:
                book.save()
            over = time_is_up()
            return not over

        def pack_done(number: int) -> bool:
            state.last_pack = number
            state.bytes_read = read_before + self.result.bytes_read
            return noted()

        def snapshot_done(id_: SnapshotId) -> bool:
            state.checked.append(str(id_))
            return noted()

        read_before = state.bytes_read
        # Packs first, in the order of their numbers: those that are added meanwhile have higher ones and come last.
        self._scrub(after=state.last_pack, goes_on=pack_done)
        if not over:
            # Content was read with the packs, so snapshots need no second read: only lookups.
            known = set(state.checked)
            left = [id_ for id_ in self.repository.snapshots.ids() if str(id_) not in known]
            self._verify_snapshots(self._load(left, are_named=False), read=False, goes_on=snapshot_done)
        self._report_damage()
        state.damages += len(self.result.damages)
        if not over:
            book.complete(now_ns())
        self._show_progress(b"")
        return self.result
