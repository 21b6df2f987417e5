"""The one writer: chunks, trees and block maps in, a snapshot out; and the removal of what nobody needs.

Nothing is promised durable before `commit` returns. Whatever a crash leaves is found and put right by the
next writer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from ciuic.errors import NotFound
from ciuic.repository import maintenance
from ciuic.repository.blockmaps import BlockMaps, update_block_map
from ciuic.repository.catalogue import info_of
from ciuic.repository.cataloguing import Cataloguing
from ciuic.repository.coding import Pace
from ciuic.repository.config import CODECS_VERSION, raise_format, read_file, repair_config
from ciuic.repository.disk import Disk
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.ids import Bytes
from ciuic.repository.index import INDEX_NAME
from ciuic.repository.lock import Lock
from ciuic.repository.model import PackKind, Shortened
from ciuic.repository.packing import Content
from ciuic.repository.packs import Packs
from ciuic.repository.recovery import Tail, reconcile
from ciuic.repository.sharing import Stage
from ciuic.repository.snapformat import Marks, decode_marks, encode_marks, encode_snapshot
from ciuic.repository.snapshots import SNAPSHOTS_DIR
from ciuic.repository.store import ChunkStore
from ciuic.repository.treeformat import encode_xattrs
from ciuic.repository.trees import Trees
from ciuic.repository.treeupdate import update_tree
from ciuic.repository.writerindex import WriterIndex
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

if TYPE_CHECKING:
    from ciuic.repository.repository import Repository

XATTRS_INLINE_BYTES = 1024
"""Longer lists of attributes get a chunk of their own, which equal lists share."""


class Writer:
    """Holds the repository's lock from `Repository.writer` until `close`. Not for several threads at once.

    Methods that store raise OSError (ENOSPC, EIO…) as it comes; after that only `close` and the removals are
    useful, and nothing that was committed is lost.
    """

    def __init__(
        self,
        repository: Repository,
        lock: Lock,
        disk: Disk,
        packs: Packs,
        seed: int,
        *,
        pack_bytes: int | None = None,
    ) -> None:
        """For `Repository.writer`, which has taken the lock."""
        self.repository = repository
        self._lock = lock
        self._disk = disk
        self._path = str(repository.path)
        self._index = WriterIndex(packs, f"{self._path}/{INDEX_NAME}")
        try:
            tails = reconcile(disk, packs, self._index)
        except BaseException:
            self._index.close()
            raise
        self._packs = packs
        self._seed = seed
        self._pack_bytes = pack_bytes
        self._store = self._new_store(tails)
        self._promised = self._store.extent()
        """Up to here the packs hold what was there before, or was committed."""
        self._gave_back = False
        self._stage = Stage(packs.directory)
        self._trees = Trees(self._store)
        self._maps = BlockMaps(self._store)
        self._committed_bytes = 0
        self._catalogue = Cataloguing(disk, self._path, repository.snapshots, self._index)
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
        """Stores nothing more, releases the lock. Chunks put but not committed stay for the next writer to
        find, or not.
        """
        if not self._open:
            return
        self._open = False
        with ExitStack() as last:
            last.callback(self._lock.release)
            last.callback(self._packs.close)
            last.callback(self._index.close)
            last.callback(self._store.close)
            last.callback(self._stage.close)
            last.callback(self._catalogue.close)
            with suppress(OSError):  # nothing of this was promised; an interrupted first capture gains by it
                if not self._gave_back:
                    self._store.sync()

    def _new_store(self, tails: dict[PackKind, Tail]) -> ChunkStore:
        def raised() -> None:
            if self.repository.config.format < CODECS_VERSION:
                self.repository.config = raise_format(self._disk, self._path, self.repository.config)

        args = self._disk, self._packs, self._index, self._seed, tails
        return ChunkStore(*args, pack_bytes=self._pack_bytes, before_planes=raised)

    @property
    def new_bytes(self) -> int:
        """Bytes by which the packs have grown since the writer opened or last committed (what is buffered not
        counted).
        """
        return self._store.grown_bytes - self._committed_bytes

    # -- content

    @property
    def chunks(self) -> ChunkStore:
        """Reads what is in the repository and what this writer has put (`get`, `has`)."""
        return self._store

    @property
    def trees(self) -> Trees:
        """Trees, those that this writer has made included."""
        return self._trees

    @property
    def block_maps(self) -> BlockMaps:
        """Block maps, those that this writer has made included."""
        return self._maps

    def put_chunk(self, data: Bytes) -> ChunkId:
        """Stores a block of file content unless it is there already. At most 16 MiB. Zeros are the caller's
        business.
        """
        return self._store.put(data, "data")

    def put_chunks(self, blocks: Sequence[Content]) -> list[ChunkId]:
        """As `put_chunk` for each, and faster. Views of `bytes` are kept as they are until they are written, and what is
        staged is shared if it is stored as it is; of anything else the content is copied."""
        return self._store.put_all(blocks, "data")

    def set_pace(self, pace: Callable[[], Pace]) -> None:
        """How much time codecs (`Content.codec`) may take from here on: asked again and again. "soon" if nobody says."""
        self._store.packer.pace = pace

    @property
    def waited_seconds(self) -> float:
        """How long all else waited for codecs that are patient."""
        return self._store.packer.waited_seconds

    def keep_cached(self) -> None:
        """What is stored will be read again soon: it stays in the page cache, else it leaves that for what was there before."""
        self._store.appenders["data"].keep_cached = True

    @property
    def stage(self) -> Stage:
        """Where content is staged that may share its extents with the packs."""
        return self._stage

    def chunk_id(self, data: Bytes) -> ChunkId:
        """The id that `put_chunk` would return; stores nothing."""
        return self._store.id_of(data)

    def flush(self) -> None:
        """Makes what was put so far durable without a snapshot: for repair, which puts lost chunks back. OSError."""
        self._store.sync()

    def put_xattrs(self, pairs: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
        """(Entry.xattrs, FLAG_XATTRS_CHUNK or 0): sorted, in the entry or in a chunk of their own.

        ValueError when they are more than 16 MiB together.
        """
        ordered = tuple(sorted(pairs))
        if sum(len(key) + len(value) for key, value in ordered) <= XATTRS_INLINE_BYTES:
            return ordered, 0
        return ((b"", self._put_meta(encode_xattrs(ordered))),), FLAG_XATTRS_CHUNK

    def update_tree(
        self, base: bytes, changes: Mapping[bytes, Entry | None], *, links: bool = False
    ) -> TreeRef:
        """The tree ``base`` (b"" empty) with these names set or (None) removed; id b"" when nothing is left.

        ``changes[name].name == name``. Reads and writes only the nodes on the way to what changes. With
        ``links`` the tree is a link table: names are inode numbers, 8 bytes big-endian. ValueError for a name
        no file can have, or an entry over 64 KiB (long xattrs belong into a chunk: `put_xattrs`).
        """
        return update_tree(self._trees, self._put_meta, self._seed, base, changes, links=links)

    def update_block_map(
        self, base: MapRef | tuple[bytes, int], n_blocks: int, changes: Mapping[int, ChunkId]
    ) -> MapRef:
        """The map ``base`` with these blocks replaced (HOLE removes), cut or grown to ``n_blocks``.

        Large files may be given in several calls with ascending batches (multiples of 1024 blocks waste
        nothing).
        """
        old = base if isinstance(base, MapRef) else MapRef(*base)
        return update_block_map(self._maps, self._put_meta, old, n_blocks, changes)

    def _put_meta(self, data: bytes) -> ChunkId:
        return self._store.put(data, "meta")

    # -- snapshots

    def commit(self, draft: SnapshotDraft) -> Snapshot:
        """Makes the snapshot. On return it is durable with everything in it; before, it does not exist.

        ValueError when a root's tree is not in the repository or the id is taken. OSError: it was not made.
        """
        path = self.repository.snapshots.path(draft.id)
        if os.path.lexists(path):
            raise ValueError(f"there is a snapshot {draft.id} already")
        for root in draft.roots:
            for tree in (root.entry.content, root.links):
                if tree and not self._store.has(ChunkId(tree)):
                    raise ValueError(f"the tree {tree.hex()} of {root.path!r} is not in the repository")
        self._store.sync()
        self._catalogue.before_commit()
        snapshot = self._finished(draft)
        # A marks file of an earlier snapshot of this id, left by a crash, must not apply to this one.
        self._remove_quietly(self.repository.snapshots.marks_path(draft.id))
        self._disk.replace_file(path, encode_snapshot(snapshot, self.repository.id))
        self._committed_bytes = self._store.grown_bytes
        self._promised = self._store.extent()
        # Told at the end: SQLite syncs before it answers, and who waits for the snapshot should not wait for its row.
        self._catalogue.waiting[snapshot.id] = (info_of(snapshot), "")
        return snapshot

    def _finished(self, draft: SnapshotDraft) -> Snapshot:
        return Snapshot(
            id=draft.id,
            time_ns=draft.time_ns,
            host=draft.host,
            roots=draft.roots,
            tags=draft.tags,
            message=draft.message,
            parent=draft.parent,
            size_bytes=sum(root.entry.total_bytes + root.links_bytes for root in draft.roots),
            new_bytes=self.new_bytes,
            files=sum(root.entry.total_files + root.links_files for root in draft.roots),
            pair=draft.pair,
            left_out=draft.left_out,
            incomplete=draft.incomplete,
        )

    def set_marks(
        self,
        id_: SnapshotId,
        *,
        hold: bool | None = None,
        reason: str | None = None,
        tags: Iterable[str] | None = None,
        hold_uid: int | None = None,
    ) -> Snapshot:
        """Change what is given and leave the rest; durable on return. Releasing a hold clears its reason. NotFound.

        ``hold_uid``: the ordinary user that ``hold`` is made for. Without it a hold is that of the repository's owner, whose
        it was before notwithstanding.
        """
        snapshots = self.repository.snapshots
        if id_ not in snapshots.names():
            raise NotFound(f"there is no snapshot {id_}", hint="ciuic list shows those there are.")
        try:
            old = decode_marks(id_, read_file(snapshots.marks_path(id_)))
        except FileNotFoundError:
            old = Marks(id=id_)
        except (DamagedSnapshot, UnsupportedFormat):
            old = Marks(id=id_, held=True)  # as `SnapshotStore.load` reads it
        held = old.held if hold is None else hold
        kept_reason = old.hold_reason if reason is None else reason
        unset: int | msgspec.UnsetType = old.hold_uid if hold is None else msgspec.UNSET
        marks = Marks(
            id=id_,
            held=held,
            hold_reason=kept_reason if held else "",
            tags=old.tags if tags is None else tuple(dict.fromkeys(tags)),
            hold_uid=(unset if hold_uid is None else hold_uid) if held else msgspec.UNSET,
        )
        self._catalogue.changed = True
        self._disk.replace_file(snapshots.marks_path(id_), encode_marks(marks))
        snapshot = snapshots.load(id_)
        row = (info_of(snapshot), snapshots.signatures().get(id_, ""))
        if id_ in self._catalogue.waiting:
            self._catalogue.waiting[id_] = row
        else:
            self._index.catalogue_put([row])
        return snapshot

    def remove_snapshots(self, ids: Iterable[SnapshotId]) -> None:
        """Deletes these snapshots; durable on return. Needs no free space. NotFound before anything is
        removed.

        A held one is removed too: to refuse is the caller's decision.
        """
        chosen = list(dict.fromkeys(ids))
        snapshots = self.repository.snapshots
        missing = [id_ for id_ in chosen if not os.path.lexists(snapshots.path(id_))]
        if missing:
            raise NotFound(f"there is no snapshot {', '.join(missing)}")
        self._catalogue.changed = True
        for id_ in chosen:
            self._disk.unlink(snapshots.path(id_))
        if chosen:
            self._disk.sync_dir(f"{self._path}/{SNAPSHOTS_DIR}")
        for id_ in chosen:
            self._remove_quietly(snapshots.marks_path(id_))
        self._catalogue.removed(chosen)

    def _remove_quietly(self, path: str) -> None:
        if os.path.lexists(path):
            self._disk.remove_file(path)

    # -- packs

    def rewrite_pack(
        self, number: int, live: Container[ChunkId] | Callable[[ChunkId], bool], *, salvage: bool = False
    ) -> int:
        """Copies the live chunks of this pack elsewhere, makes them durable, drops the pack; returns the
        bytes freed.

        Every copied byte is checked first: when a live chunk has no good copy, DamagedChunk, and the pack stays
        whole. A pack whose structure is damaged stays too (DamagedPack): nobody knows what is in it. With ``salvage``
        it is rewritten all the same: for a caller who has read every live chunk, and knows that none is hidden there.
        """
        freed = maintenance.rewrite_pack(self._disk, self._store, number, live, salvage=salvage)
        self.repository.forget_pack(number)
        return freed

    def shorten_pack(
        self, number: int, live: Container[ChunkId] | Callable[[ChunkId], bool], room_bytes: int
    ) -> Shortened:
        """Copies elsewhere what is live in as many of its last segments as ``room_bytes`` allow, makes that durable, and cuts
        them off. Nothing is done when there is no room for the last one (some 4 MiB at the most).

        A way to rewrite a pack with next to no free space. Checked as in `rewrite_pack`; when nothing is left the pack goes.
        """
        shortened = maintenance.shorten_pack(self._disk, self._store, number, live, room_bytes)
        self.repository.forget_pack(number)
        return shortened

    def give_back(self) -> int:
        """Remove what was stored since the writer opened or last committed; returns the bytes freed. Needs no free space.

        For a capture that the disk has no room for: what it has written would keep that room from others until the next prune.
        After this only `close` is useful. Not after `rewrite_pack` and its like, which store what is promised. OSError.
        """
        self._gave_back = True
        self._store.close()
        freed_bytes = maintenance.give_back(self._disk, self._store, self._promised)
        self.repository.close()  # its descriptors would keep the space of packs that are gone
        return freed_bytes

    def drop_pack(self, number: int) -> int:
        """Deletes a pack with all in it; returns its size in bytes. Needs no free space. NotFound."""
        size_bytes = maintenance.drop_pack(self._disk, self._store, number)
        self.repository.forget_pack(number)
        return size_bytes

    def mark_damaged(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Reads every copy of these chunks and marks the bad ones, so that `put_chunk` stores the content
        anew.

        Returns those of which no good copy is left.
        """
        return maintenance.mark_damaged(self._store, chunks)

    def rebuild_index(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Writes index and catalogue anew from packs and snapshot files; ``progress(bytes done, bytes in all)``.

        Damage marks are kept where they can be read.
        """
        self._store.sync()
        self._store.close()
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
        """Writes a damaged copy of the configuration anew from the good one; returns the names of files
        written.
        """
        return repair_config(self._disk, self._path)
