"""Make a snapshot of files that stand in memory.

Guarantees: when `commit` returns the snapshot is durable with every byte of every file; before, it does not
exist. Content that the repository has is not stored again: a file whose content equals that of the last
snapshot keeps its entry, so that trees are shared and its time stays the time of its last change.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from typing import Final

from ciuic.errors import Damaged
from ciuic.repository import Repository, Writer
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.compression import Codec, Content
from ciuic.repository.identity import is_zero
from ciuic.training.writer.codecs import CommitCodecs
from ciuic.training.writer.messages import Manifest, ManifestFile, StoredFile
from ciuic.types import (
    PAIRED,
    ChunkId,
    Entry,
    MapRef,
    Pair,
    RootRecord,
    Snapshot,
    SnapshotDraft,
    SnapshotId,
    TreeRef,
)

_BATCH_BLOCKS: Final = 16
"""Blocks that are looked up and stored together: 4 MiB."""
_EMPTY: Final = MapRef(b"", 0)


class LastCommit:
    """Entries of the last snapshot of this writer, from which the next one takes what did not change."""

    def __init__(self) -> None:
        self.snapshot = ""
        self.entries: dict[str, Entry] = {}
        self.folders: dict[bytes, tuple[dict[bytes, Entry], Entry]] = {}
        """Listing and entry of each directory, by name."""


def commit(
    repository: Repository,
    writer: Writer,
    memory: memoryview,
    manifest: Manifest,
    root: bytes,
    known: LastCommit,
    chosen: CommitCodecs | None = None,
    pair: Callable[[], Pair | None] = lambda: None,
) -> Snapshot:
    """Store a manifest's files as one snapshot, together with files that are stored already.

    Args:
        repository: the opened repository.
        writer: holder of the repository's lock.
        memory: the arena.
        manifest: `files` lie in `memory`; `stored` are in the repository.
        root: path under which the snapshot keeps the files.
        known: entries of the last snapshot; updated on success, unchanged on failure.
        chosen: codecs of the files; None leaves the choice to the repository.
        pair: called when everything is stored, for the record of the paired snapshot.

    Raises:
        Damaged: content that `manifest.stored` names is missing; there is no snapshot.
        OSError: writing failed; there is no snapshot.
    """
    if known.snapshot not in repository.snapshots.names():
        # The last snapshot was removed, and the content of its trees may have been swept with it.
        known.folders = {}
    put = _TreeBuilder(writer, repository.block_size, manifest.time_ns, known, chosen)
    entries = {file.path: put.stored(file) for file in manifest.stored}
    files = manifest.files if chosen is None else chosen.in_order(manifest.files, memory)
    # In an order in which half-precision copies precede the masters that may be based on them.
    entries |= {file.path: put.file(file, memory) for file in files}
    folders = put.folders(entries)
    top = _folder(b"", put.time_ns, writer.update_tree(b"", _listing(entries, folders)))
    # Asked for as late as possible: the daemon answers while the files are stored, so that nothing waits for
    # it.
    other = pair()
    tags = manifest.tags if other is None or not other.id else (*manifest.tags, PAIRED)
    draft = SnapshotDraft(
        id=_snapshot_id(repository, manifest.id),
        # Not simply the time of the state: the newest snapshot must be the one taken last.
        time_ns=_commit_time_ns(repository, root, manifest.time_ns),
        host=socket.gethostname(),
        roots=(RootRecord(path=root, entry=top),),
        tags=tags,
        message=manifest.message,
        parent=known.snapshot,
        pair=other,
        set_member=manifest.set_member,
    )
    snapshot = writer.commit(draft)
    if manifest.hold_reason:
        snapshot = writer.set_marks(draft.id, hold=True, reason=manifest.hold_reason)
    # Only now: after a failed commit the next one must still compare with the snapshot that exists.
    known.snapshot, known.entries, known.folders = snapshot.id, entries, folders
    return snapshot


def _snapshot_id(repository: Repository, wanted: str) -> SnapshotId:
    """Return the wanted id if it is free, else a new one."""
    # The trainer has planned it without a look at the repository.
    return (
        SnapshotId(wanted)
        if wanted and wanted not in repository.snapshots.names()
        else repository.snapshots.new_id()
    )


def _commit_time_ns(repository: Repository, root: bytes, time_ns: int) -> int:
    """Return a time later than that of the newest snapshot of the root."""
    # Clocks are set back, and those of machines differ; yet the snapshot taken last must be the newest for
    # loading and for retention.
    newest = repository.snapshots.latest(root)
    return time_ns if newest is None else max(time_ns, newest.time_ns + 1)


def put_files(
    repository: Repository,
    writer: Writer,
    memory: memoryview,
    manifest: Manifest,
    chosen: CommitCodecs | None = None,
) -> list[StoredFile]:
    """Store a manifest's files durably, for a snapshot that another process makes.

    That process must hold a claim on the repository meanwhile, otherwise a sweep may free the content.

    Args:
        repository: the opened repository.
        writer: holder of the repository's lock.
        memory: the arena.
        manifest: its `files` are stored.
        chosen: codecs of the files; None leaves the choice to the repository.

    Raises:
        OSError: writing failed.
    """
    put = _TreeBuilder(writer, repository.block_size, manifest.time_ns, LastCommit(), chosen)
    stored = []
    for file in manifest.files if chosen is None else chosen.in_order(manifest.files, memory):
        entry = put.file(file, memory)
        stored.append(StoredFile(file.path, entry.size_bytes, entry.content, entry.map_height))
    # Before the answer: another process makes a snapshot of these files as soon as it hears of them.
    writer.flush()
    return stored


class _TreeBuilder:
    """Store the files of one snapshot and make the entries of its tree."""

    def __init__(
        self,
        writer: Writer,
        block_size: int,
        time_ns: int,
        known: LastCommit,
        chosen: CommitCodecs | None = None,
    ) -> None:
        self._chosen = chosen
        self.time_ns = time_ns
        self._writer = writer
        self._block_size = block_size
        self._known = known

    def file(self, file: ManifestFile, memory: memoryview) -> Entry:
        """Store one file of the arena and return its entry."""
        data = memory[file.offset : file.offset + file.size_bytes]
        if len(data) != file.size_bytes:
            raise ValueError(f"{file.path} ends beyond the arena of {len(memory)} bytes")
        blocks = blocks_of(file.size_bytes, self._block_size)
        if self._chosen is None:
            stored = self._blocks(data, blocks, lambda _: None)
        else:
            stored = self._blocks(data, blocks, self._chosen.codec(file))
            self._chosen.blocks[file.path] = stored
        content = self._writer.update_block_map(_EMPTY, blocks, stored)
        return self._entry(file.path, file.size_bytes, content)

    def stored(self, file: StoredFile) -> Entry:
        """Return the entry of a file whose content is in the repository already.

        Raises:
            Damaged: part of the content is missing.
        """
        chunks, maps = self._writer.chunks, self._writer.block_maps
        blocks = blocks_of(file.size_bytes, self._block_size)
        here = not file.map_height or all(map(chunks.has, maps.nodes(file.content, file.map_height)))
        # Every block is looked up once more: the claim keeps a sweep away, but not an operator's rm or a
        # damaged index.
        if not (here and all(chunks.has(id_) for _, id_ in maps.ids(file.content, file.map_height, blocks))):
            raise Damaged(f"stored content of {file.path} is missing from the repository")
        return self._entry(file.path, file.size_bytes, MapRef(file.content, file.map_height))

    def _entry(self, path: str, size_bytes: int, content: MapRef) -> Entry:
        """Return the file's entry: that of the last snapshot if the content is the same."""
        before = self._known.entries.get(path)
        # The same entry, times included: the listing stays equal, and the directory's tree is shared with the
        # last snapshot.
        if before is not None and (before.content, before.size_bytes) == (content.content, size_bytes):
            return before
        return Entry(
            name=os.fsencode(path.rpartition("/")[2]),
            mode=stat.S_IFREG | 0o644,
            uid=os.getuid(),
            gid=os.getgid(),
            size_bytes=size_bytes,
            mtime_ns=self.time_ns,
            ctime_ns=self.time_ns,
            atime_ns=self.time_ns,
            content=content.content,
            map_height=content.map_height,
        )

    def _blocks(
        self, data: memoryview, blocks: int, codec: Callable[[int], Codec | None]
    ) -> dict[int, ChunkId]:
        """Store a file's blocks and return their ids by number; blocks of zeros are left out."""
        stored: dict[int, ChunkId] = {}
        for first in range(0, blocks, _BATCH_BLOCKS):
            run: dict[int, Content] = {}
            for index in range(first, min(blocks, first + _BATCH_BLOCKS)):
                at = index * self._block_size
                block = data[at : at + self._block_size]
                # Blocks of zeros are holes and take no chunk.
                if not is_zero(block):
                    run[index] = Content(block, codec=codec(index))
            stored.update(zip(run, self._writer.put_chunks(list(run.values())), strict=True))
        return stored

    def folders(self, entries: dict[str, Entry]) -> dict[bytes, tuple[dict[bytes, Entry], Entry]]:
        """Return listing and entry of each directory; paths have one level of directories at most."""
        inside: dict[bytes, dict[bytes, Entry]] = {}
        for path, entry in entries.items():
            folder, slash, _ = path.rpartition("/")
            if slash:
                inside.setdefault(os.fsencode(folder), {})[entry.name] = entry
        made = {}
        for name, listing in inside.items():
            before = self._known.folders.get(name)
            if before is not None and before[0] == listing:
                # The same listing: its tree is stored already.
                made[name] = before
            else:
                made[name] = listing, _folder(name, self.time_ns, self._writer.update_tree(b"", listing))
        return made


def _listing(
    entries: dict[str, Entry], folders: dict[bytes, tuple[dict[bytes, Entry], Entry]]
) -> dict[bytes, Entry]:
    """Return the entries of the top directory."""
    top = {entry.name: entry for path, entry in entries.items() if "/" not in path}
    return top | {name: entry for name, (_, entry) in folders.items()}


def _folder(name: bytes, time_ns: int, tree: TreeRef) -> Entry:
    """Return a directory's entry."""
    return Entry(
        name=name,
        mode=stat.S_IFDIR | 0o755,
        uid=os.getuid(),
        gid=os.getgid(),
        mtime_ns=time_ns,
        ctime_ns=time_ns,
        atime_ns=time_ns,
        content=tree.id,
        total_files=tree.total_files,
        total_bytes=tree.total_bytes,
    )
