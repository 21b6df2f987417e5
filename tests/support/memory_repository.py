"""Repository in memory with capture's interface, for tests that make hundreds of snapshots.

It hashes its input, so equal trees have equal ids; it stores nothing and keeps no promise about crashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ciuic.repository.codecs.compression import Content
from ciuic.repository.disk.extent_sharing import Stage
from ciuic.types import HOLE, ChunkId, Entry, MapRef, Snapshot, SnapshotDraft, SnapshotId, TreeRef


def _id(data: bytes) -> ChunkId:
    return ChunkId(hashlib.md5(data, usedforsecurity=False).digest())


class _Info(NamedTuple):
    id: SnapshotId


class _Snapshots:
    def __init__(self) -> None:
        self.kept: dict[SnapshotId, Snapshot] = {}

    def newest_first(self, root: bytes) -> list[_Info]:
        return [_Info(s.id) for s in reversed(self.kept.values()) if any(r.path == root for r in s.roots)]

    def load(self, id_: SnapshotId) -> Snapshot:
        return self.kept[id_]


class _Trees:
    def __init__(self, stored: dict[bytes, dict[bytes, Entry]]) -> None:
        self._stored = stored

    def entry(self, tree: bytes, name: bytes) -> Entry | None:
        return self._stored[tree].get(name) if tree else None

    def entries(self, tree: bytes, *, after: bytes = b"") -> Iterator[Entry]:
        return iter(
            [entry for name, entry in sorted(self._stored[tree].items()) if name > after] if tree else []
        )

    def links(self, links: bytes) -> Iterator[Entry]:
        return self.entries(links)

    def link(self, links: bytes, ino: int) -> Entry | None:
        return self.entry(links, ino.to_bytes(8, "big"))


class _Writer:
    def __init__(self, repository: MemoryRepository) -> None:
        self._repository = repository
        self.new_bytes = 0
        self.stage = Stage("")

    def put_chunk(self, data: bytes) -> ChunkId:
        chunk = _id(data)
        assert len(data) <= self._repository.block_size
        self._repository.chunks[chunk] = bytes(data)
        return chunk

    def put_chunks(self, blocks: Sequence[Content]) -> list[ChunkId]:
        return [self.put_chunk(bytes(block.data)) for block in blocks]

    def put_xattrs(self, pairs: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
        return tuple(sorted(pairs)), 0

    def update_tree(
        self, base: bytes, changes: Mapping[bytes, Entry | None], *, links: bool = False
    ) -> TreeRef:
        entries = dict(self._repository.stored_trees[base]) if base else {}
        for name, entry in changes.items():
            if entry is None:
                entries.pop(name, None)
            else:
                assert entry.name == name
                entries[name] = entry
        if not entries:
            return TreeRef(ChunkId(b""))
        tree = _id(b"tree" + msgspec.msgpack.encode(sorted(entries.items())))
        self._repository.stored_trees[tree] = entries
        counted = [entry for entry in entries.values() if not entry.link and not entry.is_dir]
        below = [entry for entry in entries.values() if entry.is_dir]
        return TreeRef(
            tree,
            len(counted) + sum(entry.total_files for entry in below),
            sum(entry.size_bytes for entry in counted if entry.is_file)
            + sum(entry.total_bytes for entry in below),
        )

    def update_block_map(
        self, base: MapRef | tuple[bytes, int], n_blocks: int, changes: Mapping[int, ChunkId]
    ) -> MapRef:
        content = base.content if isinstance(base, MapRef) else base[0]
        blocks = {**self._repository.maps.get(content, {}), **changes}
        blocks = {i: chunk for i, chunk in blocks.items() if i < n_blocks and chunk != HOLE}
        if not blocks:
            return MapRef(b"", 0)
        id_ = _id(b"map" + repr(sorted(blocks.items())).encode())
        self._repository.maps[id_] = blocks
        return MapRef(id_, 1)

    def commit(self, draft: SnapshotDraft) -> Snapshot:
        snapshot = Snapshot(
            id=draft.id,
            time_ns=draft.time_ns,
            host=draft.host,
            roots=draft.roots,
            tags=draft.tags,
            message=draft.message,
            parent=draft.parent,
            left_out=draft.left_out,
            incomplete=draft.incomplete,
        )
        self._repository.snapshots.kept[draft.id] = snapshot
        return snapshot


class MemoryRepository:
    def __init__(self, path: Path, block_size: int) -> None:
        self.path = path
        self.block_size = block_size
        self.chunks: dict[bytes, bytes] = {}
        self.maps: dict[bytes, dict[int, ChunkId]] = {}
        self.stored_trees: dict[bytes, dict[bytes, Entry]] = {}
        self.snapshots = _Snapshots()
        self.trees: Any = _Trees(self.stored_trees)

    def writer(self) -> _Writer:
        return _Writer(self)

    def content(self, entry: Entry) -> bytes:
        """Return the whole content of a small file."""
        blocks = self.maps[entry.content] if entry.content else {}
        data = bytearray(entry.size_bytes)
        for index, chunk in blocks.items():
            part = self.chunks[chunk]
            at = index * self.block_size
            assert len(part) == min(self.block_size, entry.size_bytes - at), (
                "a block as long as the file says"
            )
            data[at : at + len(part)] = part
        return bytes(data)
