"""The one writer: chunks, trees and block maps in, a snapshot out; and the removal of what nobody needs.

Nothing is promised durable before `commit` returns. Whatever a crash leaves is found and cut off by the next
writer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from ciuic.repository.ids import Bytes
from ciuic.types import ChunkId, Entry, MapRef, Snapshot, SnapshotDraft, SnapshotId, TreeRef

if TYPE_CHECKING:
    from ciuic.repository.repository import Repository


class Writer:
    """Holds the repository's lock from `Repository.writer` until `close`. Not for several threads at once.

    Methods that store raise OSError (ENOSPC, EIO…) as it comes; after that only `close` and the removals are
    useful, and nothing that was committed is lost.
    """

    repository: Repository
    new_bytes: int
    """Bytes by which the packs have grown since the writer opened or last committed."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stores nothing more, releases the lock. Chunks put but not committed stay as garbage or vanish."""
        raise NotImplementedError

    # -- content

    def put_chunk(self, data: Bytes) -> ChunkId:
        """Stores a block of file content unless it is there already. At most 16 MiB. Zeros are the caller's
        business.
        """
        raise NotImplementedError

    def chunk_id(self, data: Bytes) -> ChunkId:
        """The id that `put_chunk` would return; stores nothing."""
        raise NotImplementedError

    def flush(self) -> None:
        """Makes what was put so far durable without a snapshot: for repair, which puts lost chunks back."""
        raise NotImplementedError

    def put_xattrs(self, pairs: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
        """(Entry.xattrs, FLAG_XATTRS_CHUNK or 0) for these attributes: sorted, in the entry or in a chunk of
        their own.
        """
        raise NotImplementedError

    def update_tree(
        self, base: bytes, changes: Mapping[bytes, Entry | None], *, links: bool = False
    ) -> TreeRef:
        """The tree ``base`` (b"" empty) with these names set or (None) removed; id b"" when nothing is left.

        ``changes[name].name == name``. Reads and writes only the nodes on the way to what changes. With
        ``links`` the tree is a link table: names are inode numbers, 8 bytes big-endian. ValueError for a name
        no file can have, or an entry over 64 KiB (long xattrs belong into a chunk: `put_xattrs`).
        """
        raise NotImplementedError

    def update_block_map(
        self, base: MapRef | tuple[bytes, int], n_blocks: int, changes: Mapping[int, ChunkId]
    ) -> MapRef:
        """The map ``base`` with these blocks replaced (HOLE removes), cut or grown to ``n_blocks``.

        Large files may be given in several calls with ascending batches (multiples of 1024 blocks waste
        nothing).
        """
        raise NotImplementedError

    # -- snapshots

    def commit(self, draft: SnapshotDraft) -> Snapshot:
        """Makes the snapshot. On return it is durable with everything in it; before, it does not exist.

        ValueError when a root's tree is not in the repository or the id is taken.
        """
        raise NotImplementedError

    def set_marks(
        self,
        id_: SnapshotId,
        *,
        hold: bool | None = None,
        reason: str | None = None,
        tags: Iterable[str] | None = None,
    ) -> Snapshot:
        """Changes what is given, leaves the rest; durable on return. Releasing a hold clears its reason.
        NotFound.
        """
        raise NotImplementedError

    def remove_snapshots(self, ids: Iterable[SnapshotId]) -> None:
        """Deletes these snapshots; durable on return. Needs no free space. NotFound before anything is
        removed.

        A held one is removed too: to refuse is the caller's decision.
        """
        raise NotImplementedError

    # -- packs

    def rewrite_pack(self, number: int, live: Container[ChunkId] | Callable[[ChunkId], bool]) -> int:
        """Copies the live chunks of this pack elsewhere, makes them durable, drops the pack; returns the
        bytes freed.

        Every copied byte is checked first: when a live chunk has no good copy, DamagedChunk, and the pack
        stays whole.
        """
        raise NotImplementedError

    def drop_pack(self, number: int) -> int:
        """Deletes a pack with all in it; returns its size in bytes. Needs no free space."""
        raise NotImplementedError

    def mark_damaged(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Reads every copy of these chunks and marks the bad ones, so that `put_chunk` stores the content
        anew.

        Returns those of which no good copy is left.
        """
        raise NotImplementedError

    def rebuild_index(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Writes index and catalogue anew from packs and snapshot files. ``progress(bytes done, bytes in
        all)``.
        """
        raise NotImplementedError
