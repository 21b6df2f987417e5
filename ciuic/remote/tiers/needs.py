"""Cold packs that a restore reads: the packs of a selection, and which of them cannot be read now.

Guarantee: a pack is left out only if each chunk of the selection that it has can be read from another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from ciuic.errors import Damaged
from ciuic.remote.format.names import PackRef, pack_name
from ciuic.remote.index.cold_packs import cold_packs
from ciuic.remote.index.pack_listing import list_packs
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject
from ciuic.remote.reading.remote_repository import RemoteRepository
from ciuic.remote.reading.space_reader import SpaceReader
from ciuic.repository.lookup import Located, resolve
from ciuic.repository.trees.block_maps import blocks_of
from ciuic.types import FLAG_XATTRS_CHUNK, ChunkId, Entry, RootRecord

_THREADS: Final = 16


class ColdPack(NamedTuple):
    """Cold pack that a selection needs."""

    ref: PackRef
    size_bytes: int

    @property
    def name(self) -> str:
        """Name of its object."""
        return pack_name(self.ref)


def cold_needs(repository: RemoteRepository, selected: Sequence[Located]) -> list[ColdPack]:
    """Return the cold packs that these files and directories need, sorted. One LIST where nothing is cold.

    Raises:
        Damaged: a tree cannot be read.
        RemoteUnreachable: the store did not answer for too long.
    """
    reader = repository.reader
    cold = reader.patience.of(lambda: cold_packs(reader.space.objects))
    if not cold:
        return []
    # A warm copy costs nothing to read, and is there at once.
    reader.lookup.avoid(cold)
    # Readers take the first copy that they come upon; whether there is another takes the tables of all packs.
    reader.lookup.refresh()
    listed = reader.patience.of(lambda: list_packs(reader.space.objects))
    wanted: set[PackRef] = set()
    for chunk in _with_bases(repository, _chunks(repository, selected)):
        refs = {reader.lookup.ref(location.pack) for location in reader.lookup.find(chunk)}
        if refs and refs <= cold.keys():
            # Of several cold copies a reader takes the first: all are thawed.
            wanted |= refs
    return [ColdPack(ref, listed[ref].size_bytes) for ref in sorted(wanted) if ref in listed]


def unreadable_now(reader: SpaceReader, packs: Sequence[ColdPack]) -> list[ColdPack]:
    """Return those of these packs that cannot be read before they are thawed: a request of one byte for each."""

    def is_archived(pack: ColdPack) -> bool:
        try:
            reader.patience.of(lambda: reader.space.objects.get_ranges(pack.name, [(0, 1)]))
        except ArchivedObject:
            return True
        except NoSuchObject:
            # Damage, which the restore reports with the names of the files.
            return False
        return False

    with ThreadPoolExecutor(_THREADS) as pool:
        return [pack for pack, archived in zip(packs, pool.map(is_archived, packs), strict=True) if archived]


def _with_bases(repository: RemoteRepository, chunks: Iterable[ChunkId]) -> Iterator[ChunkId]:
    seen: set[ChunkId] = set()
    for chunk in chunks:
        stack = [chunk]
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            yield one
            # Any copy may be the one that is read.
            stack += [ChunkId(found.base) for found in repository.reader.lookup.find(one) if found.base]


def _chunks(repository: RemoteRepository, selected: Sequence[Located]) -> Iterator[ChunkId]:
    """Yield the chunks of content below these; what cannot be resolved is left to the restore, which names it."""
    seen: set[bytes] = set()
    for source in selected:
        stack = [(source.root, source.entry)]
        while stack:
            root, entry = stack.pop()
            yield from _own_chunks(repository, root, entry)
            if entry.is_dir and entry.content and entry.content not in seen:
                seen.add(entry.content)
                stack += [(root, child) for child in repository.trees.entries(entry.content)]


def _own_chunks(repository: RemoteRepository, root: RootRecord, entry: Entry) -> Iterator[ChunkId]:
    try:
        full = resolve(repository, root, entry)
    except Damaged:
        return
    if full.flags & FLAG_XATTRS_CHUNK and full.xattrs:
        yield ChunkId(full.xattrs[0][1])
    if full.is_file and full.content:
        blocks = blocks_of(full.size_bytes, repository.block_size)
        for _, chunk in repository.block_maps.ids(full.content, full.map_height, blocks):
            yield chunk
