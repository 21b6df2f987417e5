"""Tests of chunks stored as planes or differences: read, moved, kept for others, and named when damaged."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import structs
from support.stored import flip, flip_stored

from ciuic.maintenance.check import check
from ciuic.maintenance.prune import prune
from ciuic.maintenance.sweep import HURRIED, Thresholds
from ciuic.maintenance.usage import measure_usage
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import (
    DamagedChunk,
    DamagedPack,
    PackRecord,
    Repository,
    UnsupportedFormat,
    Writer,
    byte_planes,
)
from ciuic.repository import pack_format as pf
from ciuic.repository.byte_planes import Widening
from ciuic.repository.byte_planes_math import BFLOAT16
from ciuic.repository.compression import MAX_WRITTEN_BASE_DEPTH, Codec, Content, TwinBase
from ciuic.repository.config import FORMAT_VERSION, config_problems, encode_config
from ciuic.repository.pack_directory import Packs
from ciuic.repository.writing.chunk_store import Bases, BufferedChunk
from ciuic.types import ChunkId, Entry, RootRecord, SnapshotDraft, SnapshotId

BLOCK = 65536
PLANES = Codec("planes", 4)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "r", block_size=BLOCK) as made:
        yield made


def states(count: int, seed: int = 1) -> list[bytes]:
    """Return contents of one block, each changed a little from the one before."""
    drawn = random.Random(seed)
    values = [drawn.gauss(0, 0.02) for _ in range(BLOCK // 4)]
    made = []
    for _ in range(count):
        made.append(struct.pack(f"<{len(values)}f", *values))
        values = [value * (1 + drawn.gauss(0, 1e-4)) for value in values]
    return made


def put(writer: Writer, data: bytes, codec: Codec | None) -> ChunkId:
    return writer.put_chunks([Content(data, codec=codec)])[0]


def difference(base: ChunkId) -> Codec:
    return Codec("difference", 4, base)


def commit(writer: Writer, chunk: ChunkId, number: int) -> SnapshotId:
    """Commit a snapshot with one file of one block."""
    ref = writer.update_block_map((b"", 0), 1, {0: chunk})
    file = Entry(
        name=b"state", mode=0o100644, size_bytes=BLOCK, content=ref.content, map_height=ref.map_height
    )
    tree = writer.update_tree(b"", {b"state": file})
    top = Entry(
        name=b"", mode=0o40755, content=tree.id, total_files=tree.total_files, total_bytes=tree.total_bytes
    )
    id_ = SnapshotId(f"cs-{number:06x}")
    writer.commit(SnapshotDraft(id=id_, time_ns=number, host="h", roots=(RootRecord(path=b"/t", entry=top),)))
    return id_


def chain_of(repository: Repository, contents: list[bytes], pack_bytes: int | None = None) -> list[ChunkId]:
    """Commit a snapshot for each content, stored as the difference from the one before."""
    chunks: list[ChunkId] = []
    for number, data in enumerate(contents, 1):
        with repository.writer(pack_bytes=pack_bytes) as writer:
            chunks.append(put(writer, data, difference(chunks[-1]) if chunks else PLANES))
            commit(writer, chunks[-1], number)
    repository.close()
    return chunks


def test_a_chain_of_differences_is_smaller_and_reads_back(repository: Repository) -> None:
    """A chain of differences is smaller than its content and reads back, also in bulk and without index."""
    contents = states(4)
    chunks = chain_of(repository, contents)
    sizes = [repository.chunks.locate(chunk).stored_bytes for chunk in chunks]
    assert sizes[0] < 0.9 * BLOCK
    assert all(size < 0.7 * BLOCK for size in sizes[1:])
    assert [repository.chunks.get(chunk) for chunk in chunks] == contents
    pieces = {piece.position: piece.source for piece in repository.bulk.read(chunks)}
    assert [position for position, source in pieces.items() if source is None] == [1, 2, 3]
    assert pieces[0] == contents[0]
    assert list(repository.scrub()) == []
    assert repository.check_index() == []
    repository.close()
    (repository.path / "index.sqlite").unlink()
    assert [repository.chunks.get(chunk) for chunk in chunks] == contents
    repository.close()
    with repository.writer() as writer:
        writer.rebuild_index()
    assert [len(repository.chunks.locate_all(chunk)) for chunk in chunks] == [1, 2, 3, 4]


def test_buffered_chunk_can_be_read_and_be_a_base(repository: Repository) -> None:
    """Buffered content can be read and be a base before it is written."""
    first, second = states(2)
    with repository.writer() as writer:
        base = put(writer, first, PLANES)
        chunk = put(writer, second, difference(base))
        assert (writer.chunks.get(base), writer.chunks.get(chunk)) == (first, second)
        writer.flush()
        assert writer.chunks.get(chunk) == second


def test_chain_of_bases_is_bounded(repository: Repository) -> None:
    """A chunk that would be one too deep in a chain of bases is stored as planes alone."""
    chunks = chain_of(repository, states(MAX_WRITTEN_BASE_DEPTH + 3))
    depths = [len(repository.chunks.locate_all(chunk)) - 1 for chunk in chunks]
    assert depths == [*range(MAX_WRITTEN_BASE_DEPTH + 1), 0, 1]


@pytest.mark.parametrize("base", [ChunkId(b"x" * 16), None], ids=["missing", "of another length"])
def test_content_is_stored_without_an_impossible_base(repository: Repository, base: ChunkId | None) -> None:
    """Content with a base that is missing or of another length is stored without it."""
    data = states(1)[0]
    with repository.writer() as writer:
        other = base or put(writer, b"1234" * 100, None)
        chunk = put(writer, data, difference(other))
        writer.flush()
    assert repository.chunks.locate(chunk).flags == pf.FLAG_PLANES
    assert repository.chunks.get(chunk) == data


def test_noise_is_stored_as_it_is(repository: Repository) -> None:
    """Content that a codec does not make smaller is stored as it is."""
    data = random.Random(3).randbytes(BLOCK)
    with repository.writer() as writer:
        for codec in ("raw", "zstd", "planes"):
            chunk = put(writer, data[:-1] + codec[:1].encode(), Codec(codec, 4))
            writer.flush()
            assert writer.chunks.find(chunk)[0].flags == 0


def test_only_a_repository_with_codecs_has_the_new_format(repository: Repository) -> None:
    """A repository gets the new format with its first encoded chunk, and older versions then refuse it."""
    with repository.writer() as writer:
        put(writer, b"text" * 1000, Codec("zstd"))
    assert Repository.open(repository.path).config.format == FORMAT_VERSION == 1
    with repository.writer() as writer:
        put(writer, states(1)[0], PLANES)
        writer.flush()
        assert Repository.open(repository.path).config.format == 2
    assert config_problems(str(repository.path)) == []
    assert repository.may_have_bases


def test_a_crash_between_the_copies_of_the_configuration_is_no_damage(repository: Repository) -> None:
    """The next writer continues after a crash between writing the two copies of the configuration."""
    old = encode_config(repository.config)
    with repository.writer() as writer:
        put(writer, states(1)[0], PLANES)
    (repository.path / "config").write_bytes(old)
    assert config_problems(str(repository.path)) == []
    assert Repository.open(repository.path).config.format == 1


def test_unknown_formats_are_refused(repository: Repository) -> None:
    """Unknown formats are refused."""
    text = encode_config(msgspec.structs.replace(repository.config, format=4))
    for name in ("config", "config.copy"):
        (repository.path / name).write_bytes(text)
    with pytest.raises(UnsupportedFormat, match="format 4"):
        Repository.open(repository.path)


def test_a_base_outlives_its_snapshot(repository: Repository) -> None:
    """Prune keeps the bases of a kept difference, and frees them once the difference is gone."""
    contents = states(4)
    chunks = chain_of(repository, contents, pack_bytes=4096)
    with repository.writer() as writer:
        writer.remove_snapshots([SnapshotId(f"cs-{number:06x}") for number in (1, 2, 3)])
    report = prune(repository, thresholds=HURRIED)
    assert not report.notes
    assert [repository.chunks.get(chunk) for chunk in chunks] == contents
    assert check(repository, read_data=True).findings == []
    with repository.writer() as writer:
        commit(writer, put(writer, b"other" * 9999, None), 9)
        writer.remove_snapshots([SnapshotId("cs-000004")])
    prune(repository, thresholds=HURRIED)
    repository.close()
    assert not any(repository.chunks.has(chunk) for chunk in chunks)
    assert repository.check_index() == []


@pytest.mark.parametrize("gone", [(1,), (1, 2), (4,), (3, 4), (1, 2, 3, 4)])
def test_space_told_of_differences_is_what_prune_frees(repository: Repository, gone: tuple[int, ...]) -> None:
    """A base counts for every snapshot whose differences stand on it: prune frees what was told, to the byte."""
    chain_of(repository, states(4), pack_bytes=4096)
    with repository.writer() as writer:
        commit(writer, put(writer, b"other" * 9999, None), 9)
    chosen = [SnapshotId(f"cs-{number:06x}") for number in gone]

    def stored_bytes() -> int:
        repository.close()
        return sum(
            record.stored_bytes
            for pack in repository.packs()
            for record in repository.pack_records(pack.number)
        )

    usage = measure_usage(repository, frozenset(chosen))
    before = stored_bytes()
    assert usage.stored_bytes == before
    with repository.writer() as writer:
        writer.remove_snapshots(chosen)
    prune(repository, thresholds=Thresholds(unused_share=0.0, pack_dead_share=0.0))
    assert before - stored_bytes() == usage.together_bytes > 0


def test_rewriting_a_pack_keeps_differences_and_bases(repository: Repository) -> None:
    """Rewriting a pack keeps differences as differences, and loses or decodes neither them nor bases."""
    contents = states(3)
    chunks = chain_of(repository, contents)
    stored = [repository.chunks.locate(chunk).stored_bytes for chunk in chunks]
    for how in ("rewrite", "shorten"):
        with repository.writer() as writer:
            for pack in repository.packs():
                if how == "rewrite":
                    writer.rewrite_pack(pack.number, lambda _: True)
                else:
                    writer.shorten_pack(pack.number, lambda _: True, 1 << 30)
        repository.close()
        assert [repository.chunks.get(chunk) for chunk in chunks] == contents
        assert [repository.chunks.locate(chunk).stored_bytes for chunk in chunks] == stored
        assert repository.check_index() == []
        assert list(repository.scrub()) == []


def test_damaged_base_is_reported_for_all_that_depend_on_it(repository: Repository) -> None:
    """A damaged base is reported for all chunks that depend on it by read, scrub and verify.

    Each of them is stored anew when its content comes again.
    """
    contents = states(3)
    chunks = chain_of(repository, contents)
    flip_stored(repository, chunks[0])
    repository.close()
    for chunk in chunks:
        with pytest.raises(DamagedChunk):
            repository.chunks.get(chunk)
    with pytest.raises(DamagedChunk, match=f"a difference: .*a difference: .*{chunks[0].hex()}"):
        repository.chunks.get(chunks[2])
    assert {found.chunk for found in repository.scrub()} == set(chunks)
    damages = verify_snapshots(repository, checksum=True).damages
    assert {(damage.chunk, damage.snapshots) for damage in damages} == {
        (chunk, (SnapshotId(f"cs-{number:06x}"),)) for number, chunk in enumerate(chunks, 1)
    }
    with repository.writer() as writer:
        assert set(writer.mark_damaged(chunks[:1])) == set(chunks)
        assert put(writer, contents[2], difference(chunks[1])) == chunks[2]
        commit(writer, chunks[2], 7)
        assert writer.chunks.get(chunks[2]) == contents[2]
        put(writer, contents[0], None)
        writer.flush()
        assert writer.mark_damaged(chunks) == []
    repository.close()
    assert [repository.chunks.get(chunk) for chunk in chunks] == contents


def test_missing_base_is_reported_without_reading(repository: Repository) -> None:
    """A missing pack with bases is reported from the structure alone."""
    chunks = chain_of(repository, states(2), pack_bytes=4096)
    with repository.writer() as writer:
        writer.drop_pack(writer.chunks.find(chunks[0])[0].pack)
    repository.close()
    with pytest.raises(DamagedChunk, match="stored as a difference"):
        repository.chunks.locate_all(chunks[1])
    found = {damage.chunk for damage in verify_snapshots(repository).damages}
    assert found == set(chunks)
    assert {finding.chunk for finding in check(repository).findings if finding.chunk} == set(chunks)


def test_repairing_a_base_makes_its_differences_readable(repository: Repository, tmp_path: Path) -> None:
    """Repairing a base from its live file makes the differences readable again, with nothing else stored."""
    contents = states(2)
    chunks = chain_of(repository, contents)
    flip_stored(repository, chunks[0])
    repository.close()
    report = check(repository, repair=True, read_data=True)
    assert report.damaged
    with repository.writer() as writer:
        put(writer, contents[0], PLANES)
    report = check(repository, repair=True, read_data=True)
    repository.close()
    assert [repository.chunks.get(chunk) for chunk in chunks] == contents
    with repository.writer() as writer:
        assert writer.mark_damaged(chunks) == []


def test_nothing_is_freed_while_a_list_that_may_name_bases_is_damaged(repository: Repository) -> None:
    """Chunks are not freed while a list that may name bases is damaged."""
    chunks = chain_of(repository, states(2), pack_bytes=4096)
    with repository.writer() as writer:
        commit(writer, put(writer, b"other" * 9999, None), 9)
        writer.remove_snapshots([SnapshotId("cs-000001")])
    repository.close()
    pack = repository.path / "packs" / f"{repository.chunks.locate(chunks[1]).pack:016x}.pack"
    repository.close()
    flip(pack, 4100)
    flip(pack, pack.stat().st_size - 8)
    packs = len(list(pack.parent.iterdir()))
    report = prune(repository, thresholds=HURRIED)
    assert any("stored as differences" in note for note in report.notes)
    assert len(list(pack.parent.iterdir())) == packs


def twins_of(data: bytes) -> bytes:
    """Return the numbers as bfloat16."""
    return b"".join(
        struct.pack("<H", bits + 0x7FFF + (bits >> 16 & 1) >> 16)
        for (bits,) in struct.iter_unpack("<I", data)
    )


def rounded_of(base: ChunkId, start: int = 0) -> Codec:
    return Codec("twin", 4, twin=TwinBase(base, Widening(BFLOAT16, start)))


def masters_of(repository: Repository, contents: list[bytes], pack_bytes: int | None = None) -> list[ChunkId]:
    """Store masters relative to their twin, at the end of a chain of bases, and return all ids."""
    chunks: list[ChunkId] = []
    with repository.writer(pack_bytes=pack_bytes) as writer:
        for data in contents:
            codec = Codec("difference", 2, chunks[-1]) if chunks else Codec("planes", 2)
            chunks.append(put(writer, twins_of(data), codec))
        chunks.append(put(writer, contents[-1], rounded_of(chunks[-1])))
        commit(writer, chunks[-1], len(contents))
    repository.close()
    return chunks


def test_masters_are_stored_relative_to_their_twins(repository: Repository, tmp_path: Path) -> None:
    """Masters stored relative to their twins take half their size, and work everywhere like differences."""
    contents = states(3)
    chunks = masters_of(repository, contents, pack_bytes=4096)
    assert repository.chunks.locate(chunks[-1]).stored_bytes < 0.51 * BLOCK
    assert repository.chunks.locate_all(chunks[-1])[0].base == chunks[-2]
    wanted = [*map(twins_of, contents), contents[-1]]
    assert prune(repository, thresholds=HURRIED).notes == []
    assert [repository.chunks.get(chunk) for chunk in chunks] == wanted
    with repository.writer() as writer:
        for pack in repository.packs():
            writer.rewrite_pack(pack.number, lambda _: True)
    repository.close()
    assert list(repository.scrub()) == []
    assert check(repository, read_data=True).findings == []
    assert verify_snapshots(repository, checksum=True).damages == []
    targets = [memoryview(bytearray(BLOCK))]
    assert list(repository.into_memory.read(chunks[-1:], targets)) == []
    assert targets[0] == contents[-1]
    repository.close()
    (repository.path / "index.sqlite").unlink()
    assert [repository.chunks.get(chunk) for chunk in chunks] == wanted


def test_damaged_twin_is_reported_for_its_masters(repository: Repository) -> None:
    """A damaged twin is reported for its masters, and stored again it makes them readable."""
    contents = states(2)
    chunks = masters_of(repository, contents)
    flip_stored(repository, chunks[0])
    repository.close()
    with pytest.raises(DamagedChunk, match=f"a difference: .*{chunks[0].hex()}"):
        repository.chunks.get(chunks[-1])
    assert {found.chunk for found in repository.scrub()} == set(chunks)
    damages = verify_snapshots(repository, checksum=True).damages
    assert {damage.chunk: damage.snapshots for damage in damages} == {
        **dict.fromkeys(chunks[:-1], ()),
        chunks[-1]: (SnapshotId("cs-000002"),),
    }
    with repository.writer() as writer:
        assert set(writer.mark_damaged(chunks[:1])) == set(chunks)
        put(writer, twins_of(contents[0]), None)
        writer.flush()
        assert writer.mark_damaged(chunks) == []
    repository.close()
    assert repository.chunks.get(chunks[-1]) == contents[-1]


def test_twins_do_not_lie_too_deep(repository: Repository) -> None:
    """Masters have at most as many bases behind them as other chunks, and are planes beyond that."""
    for count in (MAX_WRITTEN_BASE_DEPTH, MAX_WRITTEN_BASE_DEPTH + 1):
        chunks = masters_of(repository, states(count, seed=count))
        depth = len(repository.chunks.locate_all(chunks[-1])) - 1
        assert depth == (MAX_WRITTEN_BASE_DEPTH if count == MAX_WRITTEN_BASE_DEPTH else 0)


@pytest.mark.parametrize("why", ["missing", "of 8 bytes", "elsewhere"])
def test_content_is_stored_without_an_impossible_twin(repository: Repository, why: str) -> None:
    """Content whose twin cannot be used is stored all the same, and reads back."""
    data = states(1)[0]
    with repository.writer() as writer:
        base = ChunkId(b"x" * 16) if why == "missing" else put(writer, twins_of(data), None)
        codec = rounded_of(base, 1 << 30 if why == "elsewhere" else 0)
        chunk = put(writer, data, codec._replace(width=8 if why == "of 8 bytes" else 4))
        assert writer.chunks.get(chunk) == data
    assert repository.chunks.get(chunk) == data
    if why != "elsewhere":
        assert repository.chunks.locate(chunk).flags == pf.FLAG_PLANES


@pytest.mark.parametrize("better", ["difference", "twin"])
def test_better_one_of_base_and_twin_is_used(repository: Repository, better: str) -> None:
    """The better one of base and twin, as samples show, is used."""
    first, second = states(2)
    if better == "twin":
        first = states(1, seed=2)[0]
    reported: list[str] = []
    with repository.writer() as writer:
        before = put(writer, first, PLANES)
        twin = put(writer, twins_of(second), Codec("planes", 2))
        chunk = put(
            writer, second, Codec("best", 4, before, on_coded=reported.append, twin=rounded_of(twin).twin)
        )
        assert writer.chunks.get(chunk) == second
    assert reported == [better]
    repository.close()
    assert repository.chunks.locate(chunk).base == (twin if better == "twin" else before)
    assert repository.chunks.get(chunk) == second


def test_content_that_does_not_read_back_is_stored_without_twin(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content that does not read back from its twin in the trial before storing is stored without it."""
    data = states(1)[0]
    right = byte_planes.encode_beside
    monkeypatch.setattr(byte_planes, "encode_beside", lambda data, *rest: right(bytes(4) + data[4:], *rest))
    with repository.writer() as writer:
        base = put(writer, twins_of(data), None)
        chunk = put(writer, data, rounded_of(base))
    assert repository.chunks.locate(chunk).flags == pf.FLAG_PLANES
    assert repository.chunks.get(chunk) == data


def test_undecided_chunk_is_no_base(repository: Repository) -> None:
    """A chunk that may still be stored relative to one of two others is no base, as its depth is unknown."""
    data = states(1)[0]
    base, chunk = ChunkId(b"b" * 16), ChunkId(b"c" * 16)
    packs = Packs(str(repository.path / "packs"), b"", "xxh3-128")
    for undecided in (False, True):
        held = BufferedChunk(data, BLOCK, 0, b"", undecided)
        bases = Bases(packs, {base: held}.get, lambda _: [], 0)
        assert (bases.found(chunk, BLOCK, difference(base)).base is None) is undecided
        assert (bases.found(chunk, BLOCK, rounded_of(base)).twin is None) is undecided


def test_tables_that_name_no_base_are_damaged() -> None:
    """Tables with a difference without base, a base without difference or impossible flags are damaged."""
    id_ = ChunkId(b"i" * 16)
    record = PackRecord(id_, 4096 + 136, 10, 20, pf.FLAG_PLANES | pf.FLAG_DIFFERENCE, 0, ChunkId(b"b" * 16))
    table = pf.encode_table(4096, [record], 10)
    head = pf.decode_segment_head(table, 4096)
    assert head is not None
    assert pf.decode_table(table, 1, 4096, head) == [record]
    for flags in (
        pf.FLAG_PLANES | pf.FLAG_DIFFERENCE,
        pf.FLAG_BASE,
        pf.FLAG_DIFFERENCE,
        pf.FLAG_ZSTD | pf.FLAG_PLANES,
    ):
        bad = pf.encode_table(4096, [structs.replace(record, flags=flags, base=b"", offset=4096 + 88)], 10)
        with pytest.raises(DamagedPack):
            pf.decode_table(bad, 1, 4096, pf.SegmentHead(1, 10))
