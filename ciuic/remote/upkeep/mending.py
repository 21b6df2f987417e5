"""Store lost chunks again, from sound copies in the remote or in the repository of this host.

Guarantee: every byte that is stored again was compared with its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ciuic.errors import Damaged, NotFound
from ciuic.remote.format.names import new_pack_ref
from ciuic.remote.format.pack_writer import RemotePackWriter
from ciuic.remote.reading.remote_repository import RemoteRepository
from ciuic.remote.reading.space_reader import SpaceReader
from ciuic.repository import Repository
from ciuic.repository.errors import Archived
from ciuic.repository.format.pack_format import checksum
from ciuic.repository.ids import Bytes
from ciuic.repository.model import PackKind, PackRecord
from ciuic.types import ChunkId


def contents(
    repository: RemoteRepository, local: Repository | None, chunks: Iterable[ChunkId]
) -> Iterator[tuple[ChunkId, Bytes]]:
    """Yield the content of each of the chunks of which any sound copy is found; reading compares it with the id."""
    for chunk in chunks:
        for source in (repository, local):
            if source is None:
                continue
            try:
                yield chunk, source.chunks.get(chunk)
            except (Damaged, NotFound, Archived):
                continue
            break


def store_again(
    reader: SpaceReader, contents: Iterable[tuple[ChunkId, Bytes]], kinds: Mapping[ChunkId, PackKind]
) -> int:
    """Store chunks in new packs, of these kinds; return how many. Nothing has to be committed: live snapshots refer to them."""
    writers: dict[PackKind, RemotePackWriter] = {}
    number = 0

    def send(kind: PackKind) -> None:
        writer = writers.pop(kind)
        parts = writer.finish()
        reader.patience.of(lambda: reader.space.objects.put(writer.name, parts))

    for chunk, content in contents:
        kind = kinds[chunk]
        if kind in writers and not writers[kind].fits(len(content)):
            send(kind)
        if kind not in writers:
            writers[kind] = RemotePackWriter(reader.space.sealer, new_pack_ref(kind))
        record = PackRecord(chunk, 0, len(content), len(content), 0, checksum(content), b"")
        if writers[kind].add(record, content) is None:
            raise AssertionError("a new pack has room for a chunk")
        number += 1
    for kind in list(writers):
        send(kind)
    return number
