"""Check of a remote from its objects alone: what its logs commit is whole."""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3

from ciuic.remote.access import Remote
from ciuic.remote.format.documents import decode_manifest, object_digest
from ciuic.remote.format.names import PACKS_PREFIX, parse_pack
from ciuic.remote.format.pack import RemotePackReader
from ciuic.remote.log.log_reader import LogReader
from ciuic.repository import Walker
from ciuic.repository.format.snapshot_format import StoredMarks, apply_marks, decode_snapshot
from ciuic.repository.packs.chunk_reader import unpack
from ciuic.repository.trees.block_maps import BlockMaps
from ciuic.repository.trees.tree_reader import Trees
from ciuic.types import ChunkId, Snapshot


class StoredChunks:
    """Content of every chunk in the packs of a remote, decoded and compared with its id."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._stored: dict[bytes, tuple[bytes, int, int, bytes]] = {}
        self.packs = 0
        self.copies = 0
        for info in remote.objects.list(PACKS_PREFIX):
            ref = parse_pack(info.name)
            assert ref is not None, info.name
            reader = RemotePackReader(remote.sealer, ref)
            records = reader.check(bytes(remote.objects.get(info.name)))
            self.packs += 1
            self.copies += len(records)
            for record, data in zip(records, reader.read_records(remote.objects, records), strict=True):
                self._stored[record.id] = (bytes(data), record.raw_bytes, record.flags, record.base)

    def get(self, chunk: ChunkId) -> bytes:
        data, raw_bytes, flags, base = self._stored[chunk]
        content = unpack(data, raw_bytes, flags, base=self.get(ChunkId(base)) if base else None)
        assert self._remote.identity.chunk_id(content) == chunk
        return content

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._stored

    def __len__(self) -> int:
        return len(self._stored)


class _Source:
    """What a walk reads."""

    def __init__(self, chunks: StoredChunks, block_size: int) -> None:
        self.trees = Trees(chunks)
        self.block_maps = BlockMaps(chunks)
        self.block_size = block_size


def committed(remote: Remote) -> dict[str, Snapshot]:
    """Return the snapshots that logs commit, by the names of their manifests."""
    reader = LogReader(remote.objects, remote.sealer)
    reader.refresh()
    found = {}
    for name, live in reader.live().items():
        data = bytes(remote.objects.get(name))
        assert object_digest(data) == live.digest == blake3(data).hexdigest()
        manifest = decode_manifest(remote.sealer, name, data)
        stored = decode_snapshot(live.snapshot, manifest.snapshot, live.repository)
        found[name] = apply_marks(stored, StoredMarks(id=live.snapshot))
    return found


def assert_whole(
    remote: Remote, *, each: Callable[[Snapshot], None] = lambda snapshot: None
) -> dict[str, Snapshot]:
    """Read every committed snapshot to its last byte; return them by the names of their manifests."""
    chunks = StoredChunks(remote)
    source = _Source(chunks, remote.stored.block_size)
    found = committed(remote)
    for snapshot in found.values():
        for reached in Walker(source).walk(snapshot):
            if reached.kind == "data":
                chunks.get(reached.id)
        each(snapshot)
    return found
