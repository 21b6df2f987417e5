"""A snapshot out of files that stand in memory.

Guarantees: the snapshot is durable when `commit` returns, with every byte of every file, and does not exist before. What is in the
repository already is not stored again: a file whose content is what the last snapshot has keeps its entry, so that trees are shared
and its time stays the time of its last change.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterable
from typing import Final

from ciuic.errors import Damaged
from ciuic.pairing import PAIRED
from ciuic.repository import Repository, Writer
from ciuic.repository.blockmaps import blocks_of
from ciuic.repository.coding import Codec
from ciuic.repository.ids import is_zero
from ciuic.repository.packing import Content
from ciuic.training.codecs import Chosen
from ciuic.training.messages import File, Manifest, StoredFile
from ciuic.types import ChunkId, Entry, MapRef, Pair, RootRecord, Snapshot, SnapshotDraft, SnapshotId, TreeRef

_AT_ONCE: Final = 16
"""Blocks that are looked up and handed over together: 4 MiB."""
_EMPTY: Final = MapRef(b"", 0)


class Known:
    """What the last snapshot of this writer has, so that the next one can keep it."""

    def __init__(self) -> None:
        self.snapshot = ""
        self.entries: dict[str, Entry] = {}
        self.folders: dict[bytes, tuple[dict[bytes, Entry], Entry]] = {}
        """Of each: what is in it, and its own entry."""


def commit(
    repository: Repository,
    writer: Writer,
    memory: memoryview,
    manifest: Manifest,
    root: bytes,
    known: Known,
    chosen: Chosen | None = None,
    pair: Callable[[], Pair | None] = lambda: None,
) -> Snapshot:
    """Stores ``manifest.files`` from ``memory`` as one snapshot, under ``root``, with what ``manifest.stored`` says is there already.

    OSError, or Damaged where something of that is not there: it was not made, and ``known`` is as it was. ``chosen``: which
    codecs; without it the repository chooses. ``pair``: its other half, asked for when all is stored.
    """
    if known.snapshot not in repository.snapshots.names():
        known.folders = {}  # somebody removed it, and what its trees refer to may be gone with it
    put = _Put(writer, repository.block_size, manifest.time_ns, known, chosen)
    entries = {file.path: put.stored(file) for file in manifest.stored}
    files = manifest.files if chosen is None else chosen.in_order(manifest.files, memory)
    entries |= {file.path: put.file(file, memory) for file in files}
    folders = put.folders(entries)
    top = _folder(b"", put.time_ns, writer.update_tree(b"", _listing(entries, folders)))
    other = pair()
    tags = manifest.tags if other is None or not other.id else (*manifest.tags, PAIRED)
    draft = SnapshotDraft(
        id=_id(repository, manifest.id),
        time_ns=_after_the_newest(repository, root, manifest.time_ns),
        host=socket.gethostname(),
        roots=(RootRecord(path=root, entry=top),),
        tags=tags,
        message=manifest.message,
        parent=known.snapshot,
        pair=other,
    )
    snapshot = writer.commit(draft)
    if manifest.hold_reason:
        snapshot = writer.set_marks(draft.id, hold=True, reason=manifest.hold_reason)
    known.snapshot, known.entries, known.folders = snapshot.id, entries, folders
    return snapshot


def _id(repository: Repository, wanted: str) -> SnapshotId:
    return (
        SnapshotId(wanted)
        if wanted and wanted not in repository.snapshots.names()
        else repository.snapshots.new_id()
    )


def _after_the_newest(repository: Repository, root: bytes, time_ns: int) -> int:
    """Clocks are set back, and machines differ; what was taken last must be the newest, for who loads and for who deletes."""
    newest = repository.snapshots.latest(root)
    return time_ns if newest is None else max(time_ns, newest.time_ns + 1)


def put_files(
    repository: Repository,
    writer: Writer,
    memory: memoryview,
    manifest: Manifest,
    chosen: Chosen | None = None,
) -> list[StoredFile]:
    """Stores ``manifest.files`` from ``memory``, durably on return, for a snapshot that somebody else will make: who holds a claim
    on the repository meanwhile. OSError. ``chosen``: as in `commit`."""
    put = _Put(writer, repository.block_size, manifest.time_ns, Known(), chosen)
    stored = []
    for file in manifest.files if chosen is None else chosen.in_order(manifest.files, memory):
        entry = put.file(file, memory)
        stored.append(StoredFile(file.path, entry.size_bytes, entry.content, entry.map_height))
    writer.flush()
    return stored


class _Put:
    def __init__(
        self,
        writer: Writer,
        block_size: int,
        time_ns: int,
        known: Known,
        chosen: Chosen | None = None,
    ) -> None:
        self._chosen = chosen
        self.time_ns = time_ns
        self._writer = writer
        self._block_size = block_size
        self._known = known

    def file(self, file: File, memory: memoryview) -> Entry:
        data = memory[file.offset : file.offset + file.size_bytes]
        if len(data) != file.size_bytes:
            raise ValueError(f"{file.path} does not lie in the arena")
        blocks = blocks_of(file.size_bytes, self._block_size)
        if self._chosen is None:
            stored = self._blocks(data, blocks, lambda _: None)
        else:
            stored = self._blocks(data, blocks, self._chosen.codec(file))
            self._chosen.blocks[file.path] = stored
        content = self._writer.update_block_map(_EMPTY, blocks, stored)
        return self._entry(file.path, file.size_bytes, content)

    def stored(self, file: StoredFile) -> Entry:
        """Damaged where not all of it is in the repository."""
        chunks, maps = self._writer.chunks, self._writer.block_maps
        blocks = blocks_of(file.size_bytes, self._block_size)
        here = not file.map_height or all(map(chunks.has, maps.nodes(file.content, file.map_height)))
        if not (here and all(chunks.has(id_) for _, id_ in maps.ids(file.content, file.map_height, blocks))):
            raise Damaged(f"what was stored of {file.path} is not in the repository any more")
        return self._entry(file.path, file.size_bytes, MapRef(file.content, file.map_height))

    def _entry(self, path: str, size_bytes: int, content: MapRef) -> Entry:
        before = self._known.entries.get(path)
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
        stored: dict[int, ChunkId] = {}
        for first in range(0, blocks, _AT_ONCE):
            run: dict[int, Content] = {}
            for index in range(first, min(blocks, first + _AT_ONCE)):
                at = index * self._block_size
                block = data[at : at + self._block_size]
                if not is_zero(block):
                    run[index] = Content(block, codec=codec(index))
            stored.update(zip(run, self._writer.put_chunks(list(run.values())), strict=True))
        return stored

    def folders(self, entries: dict[str, Entry]) -> dict[bytes, tuple[dict[bytes, Entry], Entry]]:
        """One level of them, which is all there is."""
        inside: dict[bytes, dict[bytes, Entry]] = {}
        for path, entry in entries.items():
            folder, slash, _ = path.rpartition("/")
            if slash:
                inside.setdefault(os.fsencode(folder), {})[entry.name] = entry
        made = {}
        for name, listing in inside.items():
            before = self._known.folders.get(name)
            if before is not None and before[0] == listing:
                made[name] = before
            else:
                made[name] = listing, _folder(name, self.time_ns, self._writer.update_tree(b"", listing))
        return made


def _listing(
    entries: dict[str, Entry], folders: dict[bytes, tuple[dict[bytes, Entry], Entry]]
) -> dict[bytes, Entry]:
    """What is at the top."""
    top = {entry.name: entry for path, entry in entries.items() if "/" not in path}
    return top | {name: entry for name, (_, entry) in folders.items()}


def _folder(name: bytes, time_ns: int, tree: TreeRef) -> Entry:
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


def manifest_of(
    files: Iterable[File], *, message: str = "", tags: tuple[str, ...] = (), hold_reason: str = ""
) -> Manifest:
    """With the time now."""
    return Manifest(
        time_ns=time.time_ns(), message=message, tags=tags, hold_reason=hold_reason, files=list(files)
    )
