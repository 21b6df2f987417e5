"""Repositories of hostile structure: every chunk has the requested id, whatever its content.

XXH3 resists no attacker who knows the seed: chunks can have any id, and trees, block maps and bases can refer
to each other in any way, also in circles. Here a table that the hash function asks first forges ids
(`forging`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash
from hypothesis import strategies as st
from support.hostile import BLOCK, ID

from ciuic.repository import Repository, Writer, snapshot_format
from ciuic.repository import pack_format as pf
from ciuic.repository.block_maps import encode_map_node
from ciuic.repository.model import PackRecord
from ciuic.repository.tree_format import encode_leaf
from ciuic.types import HOLE, ChunkId, Entry, RootRecord, Snapshot, SnapshotId

DIRECTORY = stat.S_IFDIR | 0o755
FILE = stat.S_IFREG | 0o644


class Forger:
    """Store of chunks under chosen ids, in one repository."""

    def __init__(self, writer: Writer, forged: dict[bytes, bytes]) -> None:
        self._writer = writer
        self._forged = forged

    def id(self, number: int) -> ChunkId:
        """Return the id of the chunk with this number, stored yet or not."""
        return ChunkId(b"forged id" + number.to_bytes(7, "big"))

    def put(self, number: int, content: bytes) -> ChunkId:
        """Store a chunk of this content; two numbers must not have the same."""
        self._forged[content] = self.id(number)
        record = PackRecord(self.id(number), 0, len(content), len(content), 0, 0)
        self._writer.chunks.append(record, content, "meta")
        return self.id(number)

    def put_difference(self, number: int, base: int, rubbish: bytes) -> ChunkId:
        """Store a false copy of a chunk, declared as the difference from another; it decodes to garbage."""
        flags = pf.FLAG_PLANES | pf.FLAG_DIFFERENCE
        record = PackRecord(self.id(number), 0, len(rubbish), BLOCK, flags, 0, self.id(base))
        self._writer.chunks.append(record, rubbish, "data")
        return self.id(number)

    def tree(self, number: int, entries: list[Entry]) -> ChunkId:
        return self.put(number, encode_leaf(sorted(entries, key=lambda entry: entry.name), False))

    def commit(self, path: Path, top: ChunkId, *, id_: SnapshotId = ID, roots: int = 1) -> None:
        """Commit a snapshot file that names this tree as the content of its root, or of so many."""
        self._writer.flush()
        entry = Entry(name=b"", mode=DIRECTORY, content=top)
        records = tuple(
            RootRecord(path=b"/r" if number == 0 else b"/r%d" % number, entry=entry)
            for number in range(roots)
        )
        snapshot = Snapshot(id=id_, time_ns=10**18, host="h", roots=records)
        with Repository.open(path) as repository:
            (path / "snapshots" / id_).write_bytes(snapshot_format.encode_snapshot(snapshot, repository.id))


@contextmanager
def forging() -> Iterator[dict[bytes, bytes]]:
    """Give contents in the table the table's ids for the block."""
    forged: dict[bytes, bytes] = {}
    real = xxhash.xxh3_128_digest

    def digest(data: Any, seed: int = 0) -> bytes:
        return forged.get(bytes(data)) or real(data, seed=seed)

    with mock.patch.object(xxhash, "xxh3_128_digest", digest):
        yield forged


def build(path: Path, forged: dict[bytes, bytes], make: Callable[[Forger, Path], ChunkId]) -> None:
    """Build a new repository with one hostile snapshot."""
    with Repository.create(path, block_size=BLOCK) as repository, repository.writer() as writer:
        forger = Forger(writer, forged)
        forger.commit(path, make(forger, path))


def folder(name: bytes, content: ChunkId) -> Entry:
    return Entry(name=name, mode=DIRECTORY, content=content)


def file(name: bytes, content: ChunkId, blocks: int = 1, height: int = 0) -> Entry:
    return Entry(name=name, mode=FILE, size_bytes=blocks * BLOCK, content=content, map_height=height)


# -- shapes


def tree_bomb(forger: Forger, path: Path, depth: int = 60) -> ChunkId:
    """Make 2**60 names of one file whose only block is missing."""
    forger.tree(0, [file(b"x", forger.id(999))])
    for number in range(1, depth):
        forger.tree(number, [folder(b"a", forger.id(number - 1)), folder(b"b", forger.id(number - 1))])
    return forger.id(depth - 1)


def map_bomb(forger: Forger, path: Path) -> ChunkId:
    """Make a file of 2**50 equal blocks that are missing, and one of as many that exist."""
    forger.put(100, b"block" * 800 + bytes(96))
    for top, block in ((0, 999), (10, 100)):
        forger.put(top + 1, encode_map_node(1, [forger.id(block)] * (1024 - top)))
        for height in range(2, 6):
            forger.put(top + height, encode_map_node(height, [forger.id(top + height - 1)] * (1024 - top)))
    blocks = 1 << 48
    return forger.tree(50, [file(b"bad", forger.id(5), blocks, 5), file(b"good", forger.id(15), blocks, 5)])


def cycle(forger: Forger, path: Path) -> ChunkId:
    """Make a directory that contains itself, directly and through another."""
    forger.tree(1, [folder(b"back", forger.id(0)), file(b"f", forger.id(9))])
    return forger.tree(
        0, [folder(b"a", forger.id(1)), folder(b"self", forger.id(0)), file(b"x", forger.id(999))]
    )


def base_circle(forger: Forger, path: Path) -> ChunkId:
    """Make blocks that are differences from each other, in a circle, and in a chain of two hundred."""
    for number in range(3):
        forger.put_difference(number, (number + 1) % 3, b"rubbish")
    for number in range(10, 210):
        forger.put_difference(number, number + 1, b"rubbish")
    return forger.tree(5000, [file(b"circle", forger.id(0)), file(b"chain", forger.id(10))])


def many_copies(forger: Forger, path: Path) -> ChunkId:
    """Make a block with eight bad copies, differences from one with eight, eight deep: 8**8 ways."""
    for number in range(8):
        for copy in range(8):
            forger.put_difference(number, number + 1, b"rubbish %d" % copy)
    return forger.tree(5000, [file(b"x", forger.id(0))])


def giant_node(forger: Forger, path: Path) -> ChunkId:
    """Make a node of the largest size, whose names compress to almost nothing."""
    from ciuic.repository.pack_format import MAX_CHUNK_BYTES

    entries = [Entry(name=b"%07d" % number, mode=FILE) for number in range(300_000)]
    data = encode_leaf(entries, False)[:MAX_CHUNK_BYTES]
    return forger.put(0, data)


def many_large_nodes(forger: Forger, path: Path) -> ChunkId:
    """Make twelve directories of sixty thousand names: decoded and kept, each takes tens of megabytes."""
    names = [Entry(name=b"%06d" % number, mode=FILE) for number in range(60_000)]
    folders = []
    for number in range(12):
        forger.tree(number, [*names, Entry(name=b"z%d" % number, mode=FILE)])
        folders.append(folder(b"%03d" % number, forger.id(number)))
    return forger.tree(5000, folders)


def deep(forger: Forger, path: Path) -> ChunkId:
    """Make five thousand nested directories."""
    forger.tree(0, [file(b"x", forger.id(99_999))])
    for number in range(1, 5000):
        forger.tree(number, [folder(b"d", forger.id(number - 1))])
    return forger.id(4999)


def linked_names(forger: Forger, path: Path) -> ChunkId:
    """Make sixty thousand names that claim to share inodes, of which no link table knows."""
    return forger.tree(
        0, [Entry(name=b"%06d" % number, mode=FILE, link=number + 1) for number in range(60_000)]
    )


SHAPES = (
    tree_bomb,
    map_bomb,
    cycle,
    base_circle,
    many_copies,
    giant_node,
    many_large_nodes,
    deep,
    linked_names,
)
BOMBS = ("tree_bomb", "map_bomb", "many_large_nodes")
"""Shapes that restore to as much as they declare: endless, or millions of files."""


def any_graph(draw: Callable[[Any], Any], forger: Forger, path: Path) -> ChunkId:
    """Make a few trees, block maps and blocks that refer to each other at random."""
    count = draw(st.integers(1, 5))
    numbers = st.integers(0, count + 2)
    for number in range(count):
        kind = draw(st.sampled_from(("tree", "tree", "tree", "map", "difference")))
        children = [forger.id(child) for child in draw(st.lists(numbers, min_size=1, max_size=3))]
        if kind == "map":
            height = draw(st.integers(1, 3))
            forger.put(number, encode_map_node(height, [HOLE] * draw(st.integers(0, 2)) + children))
        elif kind == "difference":
            forger.put_difference(number, draw(numbers), b"rubbish %d" % number)
        else:
            kinds = [draw(st.sampled_from((DIRECTORY, DIRECTORY, FILE))) for _ in children]
            height = draw(st.integers(0, 2))
            entries = [
                Entry(name=b"%c%d" % (97 + at, number), mode=mode, content=child)
                if mode == DIRECTORY
                else file(
                    b"%c%d" % (97 + at, number), child, draw(st.sampled_from((1, 2, 1025, 1 << 21))), height
                )
                for at, (mode, child) in enumerate(zip(kinds, children, strict=True))
            ]
            forger.tree(number, entries)
    forger.put(count, b"a block" + os.urandom(8) + bytes(BLOCK - 15))
    return forger.id(0)
