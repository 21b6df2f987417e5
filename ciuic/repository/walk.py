"""Everything a snapshot refers to, each chunk once: the mark phase of garbage collection and the structure of
verify.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

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


class Seen(Protocol):
    """What the walker asks of a set."""

    def __contains__(self, chunk: object, /) -> bool: ...
    def add(self, chunk: ChunkId, /) -> None: ...


class Walker:
    """Walks snapshots, skipping what is in ``seen`` (shared between snapshots: an unchanged subtree costs one
    lookup).

    ``seen`` holds every kind of chunk unless ``seen_data`` is given, which then holds the data chunks. They are
    nearly all there are, and collection keeps them in a set that takes less memory and may claim, rightly for its
    purpose, to have seen one that it has not.
    """

    def __init__(
        self, repository: Repository, *, seen: Seen | None = None, seen_data: Seen | None = None
    ) -> None:
        self.repository = repository
        self.seen: Seen = set() if seen is None else seen
        self.seen_data: Seen = self.seen if seen_data is None else seen_data

    def walk(self, snapshot: Snapshot, *, paths: bool = False) -> Iterator[Reached]:
        """Each chunk not yet seen, parents first. A node that cannot be read raises; the walk cannot go on
        past it.
        """
        raise NotImplementedError
