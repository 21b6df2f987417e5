"""Tests of reading many chunks into the caller's buffers: content is verified, and bad ones are named."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stored import IDENTITIES, flip_stored

from ciuic.repository import Repository
from ciuic.repository.compression import Codec, Content
from ciuic.types import ChunkId

BLOCK = 65536


@pytest.fixture(params=IDENTITIES)
def repository(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Repository]:
    with Repository.create(tmp_path / "r", block_size=BLOCK, identity=request.param) as made:
        yield made


def _filled(repository: Repository) -> dict[ChunkId, bytes]:
    """Store chunks of every kind: raw, compressed, planes, and differences three deep and from any of these."""
    drawn = random.Random(5)
    values = [drawn.gauss(0, 0.02) for _ in range(BLOCK // 4)]
    made: dict[ChunkId, bytes] = {}

    def put(data: bytes, codec: Codec | None = None) -> ChunkId:
        with repository.writer() as writer:
            chunk = writer.put_chunks([Content(data, codec=codec)])[0]
            writer.flush()
        made[chunk] = data
        return chunk

    for _ in range(6):
        put(drawn.randbytes(BLOCK))
    put(b"text " * 10000)
    base = None
    for _ in range(4):
        data = struct.pack(f"<{len(values)}f", *values)
        base = put(data, Codec("difference", 4, base) if base else Codec("planes", 4))
        values = [value * (1 + drawn.gauss(0, 1e-4)) for value in values]
    raw, damaged, *_, keyed = list(made)[:8]
    base = keyed
    for width in (8, 2, 4):
        base = put(_changed(made[base], width), Codec("difference", width, base))
    put(_changed(made[raw], 4), Codec("difference", 4, raw))
    put(_changed(made[damaged], 4), Codec("difference", 4, damaged))
    repository.close()
    return made


def _changed(data: bytes, at: int) -> bytes:
    """Return data that differs in one byte."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _read(repository: Repository, chunks: list[ChunkId], sizes: list[int]) -> tuple[list[bytes], list[int]]:
    rooms = [memoryview(bytearray(b"x" * size)) for size in sizes]
    failed = repository.into_memory.read(chunks, rooms)
    return [bytes(room) for room in rooms], failed


def test_every_kind_of_chunk_comes_in_any_order(repository: Repository) -> None:
    """Chunks of every kind are read in any order, and one that is requested twice comes twice."""
    made = _filled(repository)
    chunks = [*made, *made]
    random.Random(1).shuffle(chunks)
    found, failed = _read(repository, chunks, [len(made[chunk]) for chunk in chunks])
    assert failed == []
    assert found == [made[chunk] for chunk in chunks]


def test_damaged_and_unknown_chunks_are_named(repository: Repository) -> None:
    """Damaged, wrongly sized and unknown chunks, and those that need them, are named; others are read."""
    made = _filled(repository)
    chunks = list(made)
    for position in (1, 6, 8):
        flip_stored(repository, chunks[position])
    repository.close()
    sizes = [len(made[chunk]) for chunk in chunks]
    sizes[2] -= 1
    found, failed = _read(repository, [*chunks, ChunkId(b"unknown" + bytes(9))], [*sizes, 5])
    assert sorted(failed) == [1, 2, 6, 8, 9, 10, 15, 16]
    assert all(found[position] == made[chunks[position]] for position in (0, 3, 4, 5, 7))


def test_a_pack_that_is_gone_or_cut_short_is_no_error(repository: Repository) -> None:
    """Chunks of a missing or shortened pack are named without an error."""
    made = _filled(repository)
    chunks = list(made)
    sizes = [len(made[chunk]) for chunk in chunks]
    path = repository.path / "packs" / f"{repository.chunks.locate(chunks[0]).pack:016x}.pack"
    repository.close()
    complete = path.read_bytes()
    path.write_bytes(complete[: len(complete) // 2])
    found, failed = _read(repository, chunks, sizes)
    assert failed
    assert all(found[at] == made[chunks[at]] for at in range(len(chunks)) if at not in failed)
    path.unlink()
    repository.close()
    assert sorted(_read(repository, chunks, sizes)[1]) == list(range(len(chunks)))
