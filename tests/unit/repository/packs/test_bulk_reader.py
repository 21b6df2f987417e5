"""Tests that chunks read in bulk are those that are read one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from support.small_repository import content
from support.stored import flip_stored

from ciuic.repository import MissingChunk, Repository
from ciuic.repository.bulk_reader import BulkReader
from ciuic.types import ChunkId

BLOCK = 65536


def _fill(path: Path) -> tuple[dict[ChunkId, bytes], dict[ChunkId, int]]:
    """Store raw and compressed chunks in several packs, one twice the size of a single read."""
    stored: dict[ChunkId, bytes] = {}
    with (
        Repository.create(path, block_size=BLOCK) as repository,
        repository.writer(pack_bytes=200_000) as writer,
    ):
        for number in range(60):
            data = content(number, 1 + number % 16)[: -(number % 3) or None]
            stored[writer.put_chunk(data)] = data
            if number % 10 == 0:
                writer.flush()
        large = content(1000, 512)
        stored[writer.put_chunk(large)] = large
        writer.flush()
        packs = {chunk: repository.chunks.locate(chunk).pack for chunk in stored}
    return stored, packs


def _read(repository: Repository, chunks: list[ChunkId]) -> dict[int, bytes | None]:
    found: dict[int, bytes | None] = {}
    for piece in repository.bulk.read(chunks):
        assert piece.position not in found
        found[piece.position] = None if piece.source is None else bytes(piece.source[piece.start : piece.end])
    return found


def test_each_requested_chunk_comes_once_in_any_order(tmp_path: Path) -> None:
    """Chunks come once for each request, in any order; one that no index has is left out."""
    stored, packs = _fill(tmp_path / "r")
    assert len(set(packs.values())) > 2
    chunks = [*reversed(stored), next(iter(stored)), ChunkId(b"?" * 16)]
    with Repository.open(tmp_path / "r") as repository:
        found = _read(repository, chunks)
        assert [found[at] for at in range(len(chunks) - 1)] == [stored[chunk] for chunk in chunks[:-1]]
        assert found[len(chunks) - 1] is None
        with pytest.raises(MissingChunk):
            repository.chunks.get(chunks[-1])


def test_without_an_index_they_are_found_after_the_first_search(tmp_path: Path) -> None:
    """The packs are scanned once without an index, not for each chunk."""
    stored, _ = _fill(tmp_path / "r")
    for file in (tmp_path / "r").glob("index.sqlite*"):
        file.unlink()
    with Repository.open(tmp_path / "r") as repository:
        chunks = list(stored)
        assert set(_read(repository, chunks).values()) == {None}
        repository.chunks.get(chunks[0])
        assert list(dict(sorted(_read(repository, chunks).items())).values()) == list(stored.values())


def test_a_damaged_one_is_never_handed_out(tmp_path: Path) -> None:
    """A flipped byte loses only the chunk it is in, and a missing pack only its chunks."""
    stored, _ = _fill(tmp_path / "r")
    with Repository.open(tmp_path / "r") as repository:
        chunks = list(stored)
        where = [repository.chunks.locate(chunk) for chunk in chunks]
        for at in (3, 10, 60):
            flip_stored(repository, chunks[at])
        found = _read(repository, chunks)
        assert {at for at, data in found.items() if data is None} == {3, 10, 60}
        assert all(data == stored[chunks[at]] for at, data in found.items() if data is not None)
    gone = where[20].pack
    (tmp_path / f"r/packs/{gone:016x}.pack").unlink()
    with Repository.open(tmp_path / "r") as repository:
        found = _read(repository, chunks)
        lost = {at for at, place in enumerate(where) if place.pack == gone}
        assert {at for at, data in found.items() if data is None} == lost | {3, 10, 60}


def test_a_crafted_place_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong offsets and lengths in an index allocate no memory and return no other chunk's bytes."""
    stored, _ = _fill(tmp_path / "r")
    with Repository.open(tmp_path / "r") as repository:
        chunks = list(stored)
        good = {chunk: repository.chunks.locate(chunk) for chunk in chunks}
        for change in ({"offset": -5}, {"offset": 1 << 60}, {"stored_bytes": 1 << 40}, {"flags": 1}):

            class Lying:
                def find_many(self, wanted_ids: list[ChunkId]) -> dict[ChunkId, object]:
                    return {chunk: structs.replace(good[chunk], **change) for chunk in wanted_ids}  # noqa: B023

            reader = BulkReader(repository._pack_files(), Lying(), repository.identity)
            raw = [chunk for chunk in chunks if not good[chunk].flags]
            assert [piece.source for piece in reader.read(raw)] == [None] * len(raw), change
