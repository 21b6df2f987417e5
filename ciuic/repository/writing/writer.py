"""The writer: chunks, trees and block maps in, a snapshot out; and the removal of what is not needed.

Nothing is promised durable before `commit` returns. The next writer finds and repairs whatever a crash
leaves. The catalogue of snapshots is made to agree with their files when a writer opens and closes, and read
from the files again only where they may differ from it. `OpenRepository` is the part of the public
`Repository` that writing uses, which lies above and makes writers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import msgspec

from ciuic.errors import Busy, CiuicError, NotFound
from ciuic.repository import log
from ciuic.repository.block_maps import BlockMaps, update_block_map
from ciuic.repository.compression import Codec, Content, Pace
from ciuic.repository.config import CODECS_VERSION, MAX_FILE_BYTES, StoredConfig, raise_format, repair_config
from ciuic.repository.directory_trees import Trees, update_tree
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.extent_sharing import Stage
from ciuic.repository.identity import Bytes, Identity
from ciuic.repository.index_database import (
    INDEX_NAME,
    MARKS_SEEN,
    SNAPSHOTS_SEEN,
    changed_ns,
    info_of,
    settled_ns,
)
from ciuic.repository.locks import Lock, is_claimed
from ciuic.repository.model import PackInfo, PackKind, PackRecord, Shortened, SnapshotInfo
from ciuic.repository.pack_directory import Packs
from ciuic.repository.snapshot_format import StoredMarks, decode_marks, encode_marks, encode_snapshot
from ciuic.repository.snapshots import MARKS_DIR, SNAPSHOTS_DIR, CommittedSnapshots, SnapshotStore
from ciuic.repository.tree_format import MAX_TOTAL_BYTES, encode_xattrs
from ciuic.repository.writer_index import Tail, WriterIndex, reconcile
from ciuic.repository.writing import pack_maintenance
from ciuic.repository.writing.chunk_store import ChunkStore
from ciuic.repository.writing.pack_maintenance import Begun, Recoded, recode
from ciuic.system.disk import Disk, read_regular
from ciuic.types import (
    FLAG_XATTRS_CHUNK,
    ChunkId,
    Entry,
    MapRef,
    Snapshot,
    SnapshotDraft,
    SnapshotId,
    TreeRef,
)


class OpenRepository(Protocol):
    """An open repository; `ciuic.repository.Repository` documents each member."""

    path: Path
    id: str
    block_size: int
    config: StoredConfig
    snapshots: CommittedSnapshots

    @property
    def may_have_bases(self) -> bool:
        """True if chunks may be stored as differences."""

    def packs(self) -> list[PackInfo]:
        """Return all packs by number."""

    def pack_records(self, number: int, *, salvage: bool = False) -> Iterator[PackRecord]:
        """Return all records of a pack."""

    def stored_bytes(self) -> int:
        """Return the size of all packs together."""

    def forget_pack(self, number: int) -> None:
        """Close a deleted pack."""

    def close(self) -> None:
        """Close all descriptors."""


def _committed_snapshot(draft: SnapshotDraft, new_bytes: int, placed_ns: int = 0) -> Snapshot:
    """Return the snapshot that a commit of the draft makes, with the totals of its roots."""
    return Snapshot(
        id=draft.id,
        time_ns=draft.time_ns,
        host=draft.host,
        roots=draft.roots,
        tags=draft.tags,
        message=draft.message,
        parent=draft.parent,
        # Hard-linked files count in the link table, once for all their names.
        size_bytes=min(
            MAX_TOTAL_BYTES, sum(root.entry.total_bytes + root.links_bytes for root in draft.roots)
        ),
        new_bytes=new_bytes,
        files=sum(root.entry.total_files + root.links_files for root in draft.roots),
        pair=draft.pair,
        set_member=draft.set_member,
        left_out=draft.left_out,
        incomplete=draft.incomplete,
        placed_ns=placed_ns,
    )


def place_in_order(time_ns: int, *, now_ns: int, newest_ns: int, parent_ns: int) -> int:
    """Return `Snapshot.placed_ns` of a snapshot that is about to be committed.

    It comes after its parent, and after those that are dated in the future because the clock was ahead. In
    every other case its time decides: captures that overlap are committed in any order.

    Args:
        time_ns: Its cut.
        now_ns: The clock at the commit.
        newest_ns: Largest place of those that are there; -1 for none.
        parent_ns: Place of its parent; -1 for none.
    """
    floor_ns = max(newest_ns if newest_ns > now_ns else -1, parent_ns)
    return floor_ns + 1 if time_ns <= floor_ns else 0


def _read_marks(id_: SnapshotId, path: str) -> StoredMarks:
    """Return the marks in this file, for a change of them."""
    try:
        return decode_marks(id_, read_regular(path, MAX_FILE_BYTES))
    except FileNotFoundError:
        return StoredMarks(id=id_)
    except (DamagedSnapshot, UnsupportedFormat):
        # Unreadable marks count as held, as in `SnapshotStore.load`.
        return StoredMarks(id=id_, held=True)


def _changed_marks(
    old: StoredMarks,
    *,
    hold: bool | None = None,
    reason: str | None = None,
    tags: Iterable[str] | None = None,
    hold_uid: int | None = None,
    message: str | None = None,
) -> StoredMarks:
    """Return ``old`` with the given marks changed; see `Writer.set_marks`."""
    held = old.held if hold is None else hold
    kept_reason = old.hold_reason if reason is None else reason
    # A new hold without a uid is that of the repository's owner, not of the user who held the snapshot before.
    kept_uid: int | msgspec.UnsetType = old.hold_uid if hold is None else msgspec.UNSET
    return StoredMarks(
        id=old.id,
        held=held,
        hold_reason=kept_reason if held else "",
        tags=old.tags if tags is None else tuple(dict.fromkeys(tags)),
        hold_uid=(kept_uid if hold_uid is None else hold_uid) if held else msgspec.UNSET,
        message=old.message if message is None else message,
    )


_CATALOGUED: Final = {SNAPSHOTS_SEEN: SNAPSHOTS_DIR, MARKS_SEEN: MARKS_DIR}


class _WriterCatalogue:
    """Catalogue of one writer; an error in it is never a reason to fail."""

    def __init__(self, disk: Disk, path: str, snapshots: SnapshotStore, index: WriterIndex) -> None:
        self._disk = disk
        self._path = path
        self._snapshots = snapshots
        self._index = index
        self.waiting: dict[str, tuple[SnapshotInfo, str]] = {}
        """Rows of snapshots made by this writer."""
        self._newest_ns = -1
        """Place of the last snapshot in the order of commits; -1: not looked up yet."""
        self.changed = False
        """True if this writer added, removed or replaced a snapshot or a mark."""

    def note_new_repository(self, packs: Packs) -> None:
        """Record that no snapshot is missing while there is nothing yet.

        Leftovers of a first capture are then known as garbage.
        """
        # A number that the index remembers means that there were packs, and so perhaps snapshots.
        if not self._index.last_pack() and not packs.numbers() and not self._snapshots.names():
            self._index.set_no_snapshots(holds=True)

    def place_of(self, draft: SnapshotDraft) -> int:
        """Return the place of a new snapshot in the order of commits; 0: that of its time."""
        if self._newest_ns < 0:
            newest = self._snapshots.latest()
            self._newest_ns = 0 if newest is None else newest.order_ns
        placed_ns = place_in_order(
            draft.time_ns,
            now_ns=time.time_ns(),
            newest_ns=self._newest_ns,
            parent_ns=self._order_of(draft.parent),
        )
        self._newest_ns = max(self._newest_ns, placed_ns, draft.time_ns)
        return placed_ns

    def _order_of(self, parent: str) -> int:
        """Return the place of a draft's parent; -1 where there is none, or it cannot be read."""
        try:
            return self._snapshots.load(SnapshotId.parse(parent)).order_ns if parent else -1
        except (CiuicError, ValueError):
            return -1

    def before_commit(self) -> None:
        """Record that snapshots may be missing from now on: the first one is about to be committed."""
        self.changed = True
        self._index.set_no_snapshots(holds=False)

    def removed(self, ids: Iterable[SnapshotId]) -> None:
        """Remove the rows of snapshots that were removed on purpose."""
        chosen = list(ids)
        self._index.catalogue_remove(chosen)
        for id_ in chosen:
            self.waiting.pop(id_, None)
        if not self._snapshots.names():
            self._index.set_no_snapshots(holds=True)

    def close(self) -> None:
        """Write the catalogue, and record that it matches the files, for the next writer or reader."""
        if self.waiting:
            self._index.catalogue_put(self.waiting.values())
        if self.changed:
            for name, directory in _CATALOGUED.items():
                # Up to 10 ms of waiting cost nobody anything here: the snapshot was reported at commit.
                self._index.set_seen(name, settled_ns(f"{self._path}/{directory}", wait=True))

    def _restore_marks(self, ids: set[str]) -> None:
        """Restore, from the catalogue, marks files that are gone although their snapshots are there.

        Nothing deletes one alone, not even a release: without it the next prune would remove a held snapshot.
        """
        for info in self._index.catalogue_infos() if ids else ():
            if info.id in ids:
                marks = StoredMarks(
                    id=info.id,
                    held=info.held,
                    hold_reason=info.hold_reason,
                    tags=info.tags,
                    message=info.message,
                )
                log.warning("marks_brought_back", snapshot=info.id, held=info.held)
                # A full disk must not keep this writer from freeing space.
                with suppress(OSError):
                    self._disk.replace_file(self._snapshots.marks_path(info.id), encode_marks(marks))

    def refresh(self) -> None:
        """Make the catalogue agree with snapshots/ and marks/, and delete what a crash left there."""
        # Read before the directories, so that a change meanwhile makes the recorded time too old, never too
        # new.
        before = {
            name: settled_ns(f"{self._path}/{directory}", wait=False)
            for name, directory in _CATALOGUED.items()
        }
        unchanged = all(
            self._index.seen_ns(name) == changed_ns(f"{self._path}/{directory}")
            for name, directory in _CATALOGUED.items()
        )
        for directory in (".",) if unchanged else (".", *_CATALOGUED.values()):
            for name in os.listdir(f"{self._path}/{directory}"):
                # Left by a crash: the lock excludes a writer that is about to rename it.
                if name.endswith(".tmp"):
                    self._disk.unlink(f"{self._path}/{directory}/{name}")
        if unchanged:
            return
        snapshots = self._snapshots
        if snapshots.names():
            # A power cut may have restored an older fact.
            self._index.set_no_snapshots(holds=False)
        names, signatures, known = snapshots.names(), snapshots.signatures(), self._index.catalogued()
        gone = known.keys() - names
        if gone:
            self._index.catalogue_remove(gone)
        self._restore_marks({name for name in names - signatures.keys() if known.get(name)})
        signatures = snapshots.signatures()
        stale = {name for name in names if known.get(name) != signatures.get(name, "")}
        if stale:
            self._index.catalogue_put(
                [(info, signatures.get(info.id, "")) for info in snapshots.read_infos(stale)]
            )
        for name, found_ns in before.items():
            self._index.set_seen(name, found_ns)


_XATTRS_INLINE_BYTES = 1024
"""Size up to which extended attributes stand in the entry; a longer list gets a chunk, which equal lists
share."""


class Writer:
    """The one writer, which holds the repository's lock until `close`. Not thread-safe.

    Methods that store raise OSError (ENOSPC, EIO…) unchanged; after that only `close` and the removals are
    useful, and nothing that was committed is lost.
    """

    def __init__(
        self,
        repository: OpenRepository,
        lock: Lock,
        disk: Disk,
        packs: Packs,
        identity: Identity,
        *,
        pack_bytes: int | None = None,
    ) -> None:
        """Open the writer for `Repository.writer`, which has taken the lock."""
        self.repository = repository
        self._lock = lock
        self._disk = disk
        self._path = str(repository.path)
        self._snapshots = SnapshotStore(self._path, repository.id)
        self._index = WriterIndex(packs, f"{self._path}/{INDEX_NAME}")
        try:
            tails = reconcile(disk, packs, self._index)
        except BaseException:
            self._index.close()
            raise
        self._packs = packs
        self._identity = identity
        self._pack_bytes = pack_bytes
        self._store = self._new_store(tails)
        # Extent of what was there before, or was committed.
        self._promised = self._store.extent()
        self._gave_back = False
        self._stage = Stage(packs.directory)
        self._trees = Trees(self._store)
        self._maps = BlockMaps(self._store)
        self._committed_bytes = 0
        self._catalogue = _WriterCatalogue(disk, self._path, self._snapshots, self._index)
        self._open = True
        self._catalogue.refresh()
        self._catalogue.note_new_repository(packs)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close and release the lock. Chunks put but not committed may stay for the next writer."""
        if not self._open:
            return
        self._open = False
        with ExitStack() as last:
            # Callbacks run in reverse, each one also if another raises: the lock is released last, in any case.
            last.callback(self._lock.release)
            last.callback(self._packs.close)
            last.callback(self._index.close)
            last.callback(self._store.close)
            last.callback(self._stage.close)
            last.callback(self._catalogue.close)
            # Nothing of this was promised; an interrupted first capture can use it.
            with suppress(OSError):
                if not self._gave_back:
                    self._store.sync()

    def _new_store(self, tails: dict[PackKind, Tail]) -> ChunkStore:
        def raise_config_format() -> None:
            if self.repository.config.format < CODECS_VERSION:
                self.repository.config = raise_format(self._disk, self._path, self.repository.config)

        args = self._disk, self._packs, self._index, self._identity, tails
        return ChunkStore(*args, pack_bytes=self._pack_bytes, before_planes=raise_config_format)

    @property
    def new_bytes(self) -> int:
        """Bytes by which the packs have grown since the writer opened or last committed, without buffers."""
        return self._store.grown_bytes - self._committed_bytes

    # -- content

    @property
    def chunks(self) -> ChunkStore:
        """Store that reads what is in the repository and what this writer has put (`get`, `has`)."""
        return self._store

    @property
    def trees(self) -> Trees:
        """Trees, including those that this writer has made."""
        return self._trees

    @property
    def block_maps(self) -> BlockMaps:
        """Block maps, including those that this writer has made."""
        return self._maps

    def put_chunk(self, data: Bytes) -> ChunkId:
        """Store a block of file content unless it is there already, and return its id.

        At most 16 MiB. Zeros are stored like other content: the caller uses HOLE instead.
        """
        return self._store.put(data, "data")

    def put_chunks(self, blocks: Sequence[Content]) -> list[ChunkId]:
        """Store blocks like `put_chunk`, but faster, and return their ids.

        Views of `bytes` are kept until they are written, and staged content that is stored as it is shares
        its extents; any other content is copied.
        """
        return self._store.put_all(blocks, "data")

    def set_pace(self, pace: Callable[[], Pace]) -> None:
        """Set the function that says how much time codecs may take (`Content.codec`); called often."""
        self._store.packer.pace = pace

    @property
    def waited_seconds(self) -> float:
        """Time for which everything else waited for patient codecs."""
        return self._store.packer.waited_seconds

    def keep_cached(self) -> None:
        """Keep stored pages in the page cache instead of dropping them: they are read again soon."""
        self._store.appenders["data"].keep_cached = True

    @property
    def stage(self) -> Stage:
        """Staging area for content that may share its extents with the packs."""
        return self._stage

    def flush(self) -> None:
        """Make what was put so far durable without a snapshot, for repair, which puts lost chunks back."""
        self._store.sync()

    def put_xattrs(self, pairs: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
        """Return (Entry.xattrs, FLAG_XATTRS_CHUNK or 0): sorted, in the entry or in a chunk of their own.

        ValueError when they are more than 16 MiB together.
        """
        # Sorted, so that equal attributes make equal entries and trees.
        ordered = tuple(sorted(pairs))
        if sum(len(key) + len(value) for key, value in ordered) <= _XATTRS_INLINE_BYTES:
            return ordered, 0
        return ((b"", self._put_meta(encode_xattrs(ordered))),), FLAG_XATTRS_CHUNK

    def update_tree(
        self, base: bytes, changes: Mapping[bytes, Entry | None], *, links: bool = False
    ) -> TreeRef:
        """Return the tree ``base`` with these names set or removed.

        Reads and writes only the nodes on the way to what changes.

        Args:
            base: Id of the tree, b"" for an empty one; so is that of the result when nothing is left.
            changes: Entry by its name; None removes the name.
            links: True for a link table, in which names are inode numbers, 8 bytes big-endian.

        Raises:
            ValueError: a name is impossible, or an entry is larger than 64 KiB (see `put_xattrs`).
        """
        return update_tree(self._trees, self._put_meta, self._identity.seed, base, changes, links=links)

    def update_block_map(
        self, base: MapRef | tuple[bytes, int], n_blocks: int, changes: Mapping[int, ChunkId]
    ) -> MapRef:
        """Return the map ``base`` with these blocks replaced (HOLE removes), cut or grown to ``n_blocks``.

        Large files may be given in several calls with ascending batches (multiples of 1024 blocks waste
        nothing).
        """
        old = base if isinstance(base, MapRef) else MapRef(*base)
        return update_block_map(self._maps, self._put_meta, old, n_blocks, changes)

    def _put_meta(self, data: bytes) -> ChunkId:
        return self._store.put(data, "meta")

    # -- snapshots

    def commit(self, draft: SnapshotDraft) -> Snapshot:
        """Commit the snapshot: on return it is durable with everything in it; before, it does not exist.

        Raises:
            ValueError: a root's tree is not in the repository, or the id is taken.
            OSError: the snapshot was not made.
        """
        path = self._snapshots.path(draft.id)
        if os.path.lexists(path):
            raise ValueError(f"there is a snapshot {draft.id} already")
        for root in draft.roots:
            for tree in (root.entry.content, root.links):
                # No snapshot may refer to a tree that is not stored, whatever mistake the caller made.
                if tree and not self._store.has(ChunkId(tree)):
                    raise ValueError(f"the tree {tree.hex()} of {root.path!r} is not in the repository")
        # Everything the snapshot refers to is durable before its file gets a name.
        self._store.sync()
        self._catalogue.before_commit()
        snapshot = self._snapshot_of(draft)
        # A marks file of an earlier snapshot of this id, left by a crash, must not apply to this one.
        self._remove_quietly(self._snapshots.marks_path(draft.id))
        self._disk.replace_file(path, encode_snapshot(snapshot, self.repository.id))
        self._committed_bytes = self._store.grown_bytes
        # From here on `give_back` keeps what this snapshot needs.
        self._promised = self._store.extent()
        # Added at close: SQLite syncs, and the caller of commit should not wait for a row of a cache.
        self._catalogue.waiting[snapshot.id] = (info_of(snapshot), "")
        return snapshot

    def _snapshot_of(self, draft: SnapshotDraft) -> Snapshot:
        return _committed_snapshot(draft, self.new_bytes, self._catalogue.place_of(draft))

    def set_marks(
        self,
        id_: SnapshotId,
        *,
        hold: bool | None = None,
        reason: str | None = None,
        tags: Iterable[str] | None = None,
        hold_uid: int | None = None,
        message: str | None = None,
    ) -> Snapshot:
        """Change the given marks and keep the rest; durable on return. Releasing a hold clears its reason.

        ``hold_uid`` is the ordinary user that ``hold`` is made for. Without it, the hold becomes that of the
        repository's owner, even if it was a user's before. NotFound if there is no such snapshot.
        """
        if id_ not in self._snapshots.names():
            raise NotFound(f"there is no snapshot {id_}", hint="ciuic list shows those there are.")
        old = _read_marks(id_, self._snapshots.marks_path(id_))
        marks = _changed_marks(old, hold=hold, reason=reason, tags=tags, hold_uid=hold_uid, message=message)
        self._catalogue.changed = True
        self._disk.replace_file(self._snapshots.marks_path(id_), encode_marks(marks))
        snapshot = self._snapshots.load(id_)
        row = (info_of(snapshot), self._snapshots.signatures().get(id_, ""))
        # The row of a snapshot of this writer is written at close, and must have the new marks then.
        if id_ in self._catalogue.waiting:
            self._catalogue.waiting[id_] = row
        else:
            self._index.catalogue_put([row])
        return snapshot

    def remove_snapshots(self, ids: Iterable[SnapshotId]) -> None:
        """Delete these snapshots; durable on return. Needs no free space.

        A held one is deleted too: the caller decides whether to refuse.

        Raises:
            NotFound: one does not exist; nothing was removed.
        """
        chosen = list(dict.fromkeys(ids))
        missing = [id_ for id_ in chosen if not os.path.lexists(self._snapshots.path(id_))]
        if missing:
            raise NotFound(f"there is no snapshot {', '.join(missing)}")
        self._catalogue.changed = True
        for id_ in chosen:
            self._disk.unlink(self._snapshots.path(id_))
        if chosen:
            # Durable before the marks go: a snapshot that a power cut brings back must still be held.
            self._disk.sync_dir(f"{self._path}/{SNAPSHOTS_DIR}")
        for id_ in chosen:
            self._remove_quietly(self._snapshots.marks_path(id_))
        self._catalogue.removed(chosen)

    def _remove_quietly(self, path: str) -> None:
        if os.path.lexists(path):
            self._disk.remove_file(path)

    # -- packs

    def rewrite_pack(
        self, number: int, live: Container[ChunkId] | Callable[[ChunkId], bool], *, salvage: bool = False
    ) -> int:
        """Copy the live chunks of this pack elsewhere, make them durable, drop the pack.

        Return the bytes freed. Every copied byte is checked first.

        Args:
            number: Number of the pack.
            live: Chunks to keep.
            salvage: Rewrite a damaged pack too. For a caller that has read every live chunk, and knows that
                none is hidden in the damaged part.

        Raises:
            DamagedChunk: a live chunk has no good copy; the pack stays whole.
            DamagedPack: the structure of the pack is damaged, so its content is unknown; it stays.
        """
        freed = pack_maintenance.rewrite_pack(self._disk, self._store, number, live, salvage=salvage)
        self.repository.forget_pack(number)
        return freed

    def shorten_pack(
        self, number: int, live: Container[ChunkId] | Callable[[ChunkId], bool], room_bytes: int
    ) -> Shortened:
        """Copy what is live in the last segments elsewhere, make it durable, and cut these segments off.

        A way to rewrite a pack with next to no free space. As many segments go as ``room_bytes`` allow;
        nothing is done when there is no room for the last one (at most some 4 MiB). Checked as in
        `rewrite_pack`; an empty pack is dropped.
        """
        shortened = pack_maintenance.shorten_pack(self._disk, self._store, number, live, room_bytes)
        self.repository.forget_pack(number)
        return shortened

    def recode(
        self,
        wanted: Mapping[ChunkId, Codec],
        pace: Callable[[], Pace] = lambda: "soon",
        begun: Begun | None = None,
        *,
        min_pack_bytes: int = 0,
    ) -> Recoded:
        """Store chunks again, each as its codec says, and free the space of their old copies.

        Only chunks that are stored as they are get another form, and only those whose pack is mostly theirs
        (`seal_packs`). Durable on return, pack by pack.

        Args:
            wanted: Codec of each chunk, in the order of the trials. A base need not outlive the call: it stays
                as long as the chunk does.
            pace: Called often; "patient" uses idle processor time alone, and "now" ends the work. The pack
                that is being coded then stays as it is.
            begun: Results for that pack, filled here; with them a further call begins where this one ended.
                Empty when nothing was stopped.
            min_pack_bytes: Packs with less are left: each becomes a pack of its own.

        Raises:
            Busy: another process is copying the repository, or stores part of a snapshot.
            OSError: the disk failed; nothing that was committed is lost.
        """
        # A process that copies packs must find them to the end.
        if is_claimed(self._path):
            raise Busy("another process is copying the repository, or stores part of a snapshot")
        begun = {} if begun is None else begun
        done = recode(self._disk, self._store, wanted, pace, begun, min_pack_bytes)
        # Its descriptors would keep the space of packs that are gone.
        self.repository.close()
        return done

    def seal_packs(self, min_bytes: int) -> None:
        """Begin another pack of data after what was put so far, if the current one has this size.

        So what is put later, and goes at another time, lies elsewhere.
        """
        self._store.sync()
        self._store.appenders["data"].seal(min_bytes)

    def give_back(self) -> int:
        """Remove what was stored since the writer opened or last committed; return the bytes freed.

        For a capture without enough disk space: what it has written would take that space from others until
        the next prune. Needs no free space. After this only `close` is useful. Not after `rewrite_pack` and
        the like, which store chunks of committed snapshots.
        """
        self._gave_back = True
        self._store.close()
        freed_bytes = pack_maintenance.give_back(self._disk, self._store, self._promised)
        # Its descriptors would keep the space of packs that are gone.
        self.repository.close()
        return freed_bytes

    def drop_pack(self, number: int) -> int:
        """Delete a pack with all its chunks; return its size in bytes. Needs no free space.

        Raises:
            NotFound: there is no such pack.
        """
        size_bytes = pack_maintenance.drop_pack(self._disk, self._store, number)
        self.repository.forget_pack(number)
        return size_bytes

    def mark_damaged(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Read every copy of these chunks and mark the bad ones, so that `put_chunk` stores the content anew.

        Returns those of which no good copy is left.
        """
        return pack_maintenance.mark_damaged(self._store, chunks)

    def rebuild_index(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Rebuild index and catalogue from packs and snapshot files; ``progress(bytes done, bytes in all)``.

        Damage marks are kept where they can be read.
        """
        self._store.sync()
        self._store.close()
        # Only the index knows these marks; the chunks are read again below, and marked again.
        marked, none_missing = self._index.damaged(), self._index.has_no_snapshots
        self._index.clear()
        self._index.set_no_snapshots(holds=none_missing)
        tails = reconcile(self._disk, self._packs, self._index, progress)
        self._store = self._new_store(tails)
        self._trees, self._maps = Trees(self._store), BlockMaps(self._store)
        self._committed_bytes = 0
        self._promised = self._store.extent()
        self.mark_damaged({chunk for chunk, _, _ in marked})
        self._catalogue.refresh()

    def repair_config(self) -> list[str]:
        """Rewrite a damaged copy of the configuration from the good one; return the names written."""
        return repair_config(self._disk, self._path)
