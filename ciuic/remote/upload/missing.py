"""Chunks of a local snapshot that a remote does not have.

Guarantees: when everything that `missing` yields is stored, everything that the snapshot refers to is, with
all bases. A chunk counts as stored only where its own pack and those of all its bases do: a base may lie in a
pack that a collection has condemned, while the chunk does not.

Subtrees of snapshots that the remote has whole are skipped without a look at their chunks, which makes the
cost of a snapshot that of its changes. What is known to be whole ends with `forget`: a collection may remove
what only a removed snapshot still needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Final, NamedTuple, Protocol

from ciuic.repository import Repository, Walker
from ciuic.repository.checking.walk import Reached
from ciuic.repository.model import ChunkLocation, PackKind
from ciuic.types import ChunkId, Snapshot

# Chunks that are looked up at once.
_BATCH: Final = 2048


class RemoteChunks(Protocol):
    """Lookup of chunks on the remote.

    It knows what this uploader has handed over for upload, and leaves condemned packs out.
    """

    def has_many(self, chunks: Collection[bytes]) -> set[bytes]:
        """Return those of the chunks that are on the remote, or on their way there, with all their bases."""


class MissingHere(NamedTuple):
    """Chunk that the remote lacks, with its place in the local repository."""

    id: ChunkId
    kind: PackKind
    location: ChunkLocation


class WholeSnapshots:
    """Nodes of snapshots that are whole on the remote, as long as no collection has condemned anything.

    Takes 98 bytes of memory a node: 2 MB for a tree of a million files.
    """

    def __init__(self) -> None:
        self._whole: set[ChunkId] = set()
        self._walked: set[ChunkId] = set()

    def missing(
        self, repository: Repository, remote: RemoteChunks, snapshot: Snapshot
    ) -> Iterator[MissingHere]:
        """Yield each chunk that the remote lacks, bases before what needs them.

        The caller hands each over for upload before it takes the next, and calls `add` after the commit. Until then
        nothing is remembered: a walk that was given up leaves no trace.

        Raises:
            Damaged: a chunk of the snapshot cannot be found, or a tree cannot be read.
        """
        nodes = _Nodes(self._whole)
        # Data is looked up wherever it occurs: a set of all its ids would take 2 GB for 5 TB, and one of fingerprints may
        # leave a chunk out.
        walker = Walker(repository, seen=nodes, seen_data=_Nothing())
        reached = walker.walk(snapshot)
        while batch := list(islice(reached, _BATCH)):
            yield from _lacking(repository, remote, batch)
        self._walked = nodes.walked

    def add(self) -> None:
        """Remember the snapshot of the last completed `missing` as whole; its commit stands in the log."""
        self._whole |= self._walked
        self._walked = set()

    def forget(self) -> None:
        """Forget everything: a collection has condemned packs."""
        self._whole = set()
        self._walked = set()


class _Nodes:
    """Tree and map nodes to skip: those of whole snapshots, and those that this walk has reached."""

    def __init__(self, whole: set[ChunkId]) -> None:
        self._whole = whole
        self.walked: set[ChunkId] = set()

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._whole or chunk in self.walked

    def add(self, chunk: ChunkId) -> None:
        self.walked.add(chunk)


class _Nothing:
    """Empty set that stays empty."""

    def __contains__(self, chunk: object) -> bool:
        return False

    def add(self, chunk: ChunkId) -> None:
        """Do not add the chunk."""


def _lacking(repository: Repository, remote: RemoteChunks, batch: list[Reached]) -> Iterator[MissingHere]:
    stored = remote.has_many([one.id for one in batch])
    given: set[bytes] = set()
    for one in batch:
        if one.id in stored or one.id in given:
            continue
        kind: PackKind = "data" if one.kind == "data" else "meta"
        places = repository.chunks.locate_all(one.id)
        ids = [one.id, *(ChunkId(place.base) for place in places if place.base)]
        present = remote.has_many(ids[1:]) if ids[1:] else set()
        # The deepest base first: whatever is interrupted, a stored difference has its base.
        for id_, place in zip(reversed(ids), reversed(places), strict=True):
            if id_ not in present and id_ not in given:
                given.add(id_)
                yield MissingHere(id_, kind, place)
