"""Everything a snapshot refers to, each chunk once: the mark phase of garbage collection and the structure of
verify.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ciuic.types import ChunkId, Entry, Snapshot

if TYPE_CHECKING:
    from ciuic.repository.repository import Repository


class Reached(NamedTuple):
    """A chunk, what it is, and whose it is."""

    id: ChunkId
    kind: str
    """tree | links | map | xattrs | data"""
    path: bytes
    """Absolute path of the file or directory at which it was first reached (b"" when ``paths=False``)."""
    entry: Entry | None
    """The file whose block, map or xattrs it is, or the directory whose tree it is; None in a link table's
    nodes.
    """
    block: int
    """Block number of a data chunk, else -1."""


class Walker:
    """Walks snapshots, skipping what is in ``seen`` (shared between snapshots: an unchanged subtree costs one
    lookup).
    """

    def __init__(self, repository: Repository, *, seen: set[ChunkId] | None = None) -> None:
        self.repository = repository
        self.seen: set[ChunkId] = set() if seen is None else seen

    def walk(self, snapshot: Snapshot, *, paths: bool = False) -> Iterator[Reached]:
        """Each chunk not yet seen, parents first. A node that cannot be read raises; the walk cannot go on
        past it.
        """
        raise NotImplementedError
