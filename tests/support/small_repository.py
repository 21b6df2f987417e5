"""Small snapshots made with the writer alone, and the check that a repository keeps its promises."""

from __future__ import annotations

import random

from ciuic.repository import Repository, Walker, Writer
from ciuic.types import ChunkId, Entry, RootRecord, Snapshot, SnapshotDraft, SnapshotId

BLOCK = 4096


def noise(seed: int, size_bytes: int) -> bytes:
    """Return bytes that neither compress nor repeat."""
    return random.Random(seed).randbytes(size_bytes)


def content(seed: int, blocks: int) -> bytes:
    """Return reproducible content: even seeds do not compress, odd ones do."""
    if seed % 2:
        return b"".join(b"%8d" % (seed * 1000 + at) * (BLOCK // 8) for at in range(blocks))
    return random.Random(seed).randbytes(blocks * BLOCK)


def put_file(writer: Writer, name: bytes, data: bytes) -> Entry:
    ids: dict[int, ChunkId] = {
        at // BLOCK: writer.put_chunk(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)
    }
    ref = writer.update_block_map((b"", 0), len(ids), ids)
    return Entry(
        name=name, mode=0o100600, size_bytes=len(data), content=ref.content, map_height=ref.map_height
    )


def make_snapshot(
    writer: Writer,
    id_: str,
    files: dict[bytes, bytes],
    *,
    time_ns: int = 1,
    path: bytes = b"/r",
    parent: str = "",
) -> Snapshot:
    """Make a snapshot of one root with these files in it."""
    tree = writer.update_tree(b"", {name: put_file(writer, name, data) for name, data in files.items()})
    root = Entry(
        name=b"", mode=0o40755, content=tree.id, total_files=tree.total_files, total_bytes=tree.total_bytes
    )
    draft = SnapshotDraft(
        id=SnapshotId.parse(id_),
        time_ns=time_ns,
        host="host",
        roots=(RootRecord(path=path, entry=root),),
        parent=parent,
    )
    return writer.commit(draft)


def read_files(repository: Repository, id_: str) -> dict[bytes, bytes]:
    """Return all files of the first root of a snapshot, every byte checked by the checksums."""
    snapshot = repository.snapshots.load(SnapshotId.parse(id_))
    for reached in Walker(repository).walk(snapshot):
        repository.chunks.get(reached.id)
    files = {}
    for entry in repository.trees.entries(snapshot.roots[0].entry.content):
        data = bytearray(entry.size_bytes)
        n_blocks = -(-entry.size_bytes // BLOCK)
        for at, chunk in repository.block_maps.ids(entry.content, entry.map_height, n_blocks):
            block = repository.chunks.get(chunk)
            data[at * BLOCK : at * BLOCK + len(block)] = block
        files[entry.name] = bytes(data)
    return files
