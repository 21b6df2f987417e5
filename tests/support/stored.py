"""Snapshots made of plain dictionaries and read back into them, for tests of changes to a repository.

Tests that hold for every identity of a repository are run with each of `IDENTITIES`.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from ciuic.repository import Identity, Repository, Writer, blocks_of, is_zero
from ciuic.types import HOLE, ChunkId, Entry, RootRecord, Snapshot, SnapshotDraft, SnapshotId, TreeRef

Tree = Mapping[bytes, Any]
"""Map from name to the content of a file, or another Tree."""


def store(
    writer: Writer,
    tree: Tree,
    *,
    number: int,
    time_ns: int = 0,
    tags: tuple[str, ...] = (),
    root: bytes = b"/root",
    base: bytes = b"",
) -> Snapshot:
    """Commit ``tree`` as the snapshot ``cs-<number>``."""
    ref = put_tree(writer, tree)
    entry = Entry(
        name=b"",
        mode=stat.S_IFDIR | 0o755,
        content=ref.id,
        total_files=ref.total_files,
        total_bytes=ref.total_bytes,
    )
    draft = SnapshotDraft(
        id=SnapshotId(f"cs-{number:06x}"),
        time_ns=time_ns or (number + 1) * 10**9,
        host="test",
        roots=(RootRecord(path=root, entry=entry),),
        tags=tags,
    )
    return writer.commit(draft)


def flip(path: Path, at: int, mask: int = 1) -> None:
    """Flip bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def flip_stored(repository: Repository, chunk: ChunkId) -> None:
    """Flip a bit in the stored copy of a chunk that is read."""
    where = repository.chunks.locate(chunk)
    flip(Path(repository.pack_path(where.pack)), where.offset + where.stored_bytes // 2)


def put_tree(writer: Writer, tree: Tree) -> TreeRef:
    """Store a directory and all below it."""
    changes: dict[bytes, Entry | None] = {}
    for name, value in tree.items():
        if isinstance(value, bytes):
            changes[name] = put_file(writer, name, value)
        else:
            ref = put_tree(writer, value)
            changes[name] = Entry(
                name=name,
                mode=stat.S_IFDIR | 0o755,
                content=ref.id,
                total_files=ref.total_files,
                total_bytes=ref.total_bytes,
            )
    return writer.update_tree(b"", changes)


def put_file(writer: Writer, name: bytes, data: bytes) -> Entry:
    """Store one file's blocks and map."""
    size = writer.repository.block_size
    blocks = blocks_of(len(data), size)
    changes = {}
    for number in range(blocks):
        block = data[number * size : (number + 1) * size]
        changes[number] = HOLE if is_zero(block) else writer.put_chunk(block)
    ref = writer.update_block_map((b"", 0), blocks, changes)
    return Entry(
        name=name,
        mode=stat.S_IFREG | 0o644,
        size_bytes=len(data),
        content=ref.content,
        map_height=ref.map_height,
    )


def read_back(repository: Repository, id_: SnapshotId) -> dict[bytes, Any]:
    """Return the snapshot's only root as nested dictionaries; raise Damaged for a wrong entry."""
    (root,) = repository.snapshots.load(id_).roots
    return read_tree(repository, root.entry.content)


def read_tree(repository: Repository, tree: bytes) -> dict[bytes, Any]:
    found: dict[bytes, Any] = {}
    for entry in repository.trees.entries(tree):
        if entry.is_dir:
            found[entry.name] = read_tree(repository, entry.content)
        else:
            found[entry.name] = read_file(repository, entry)
    return found


def read_file(repository: Repository, entry: Entry) -> bytes:
    size = repository.block_size
    data = bytearray(entry.size_bytes)
    blocks = blocks_of(entry.size_bytes, size)
    for number, chunk in repository.block_maps.ids(entry.content, entry.map_height, blocks):
        block = repository.chunks.get(chunk)
        data[number * size : number * size + len(block)] = block
    assert len(data) == entry.size_bytes
    return bytes(data)


SEED: Final = 0xFEDCBA9876543210
SEEDED: Final = Identity("xxh3-128", None, SEED)
KEYED: Final = Identity("blake3-128", bytes(range(100, 132)), SEED)
IDENTITIES: Final = (pytest.param(None, id="xxh3"), pytest.param(KEYED, id="blake3"))
"""None, with which `Repository.create` makes what it makes by default, and that of a format-3 repository."""
