"""Tests that of several copies of a chunk a collection keeps one that is whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.remote_world import (
    Bucket,
    Ids,
    MemoryState,
    Uploader,
    chunk,
    make_collector,
    record,
    sealer,
    store_pack,
)

from ciuic.errors import Damaged
from ciuic.remote.object_names import PackRef, pack_name, parse_pack
from ciuic.remote.pack import HEADER_BYTES, RemotePackReader
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep.collection_round import CollectionPolicy, CollectionResult

SEALER = sealer(Ids("kept"))
NO_REPACKING = CollectionPolicy(young_ns=-1, repack_share=0)


def readable(bucket: Bucket) -> set[int]:
    """Return the numbers of the chunks of which any copy can be read, with its bases."""
    copies: set[tuple[bytes, bytes]] = set()
    for name in bucket.objects:
        if ref := parse_pack(name):
            reader = RemotePackReader(SEALER, ref)
            for one in reader.read_table(bucket):
                try:
                    list(reader.read_records(bucket, [one]))
                except Damaged:
                    continue
                copies.add((one.id, one.base))
    found = {id_ for id_, base in copies if not base}
    while more := {id_ for id_, base in copies if base in found} - found:
        found |= more
    return {number for number in range(12) if chunk(number) in found}


def collect(bucket: Bucket, policy: CollectionPolicy = NO_REPACKING) -> CollectionResult:
    index = RemoteIndex.open(None, threads=1)
    try:
        return make_collector(bucket, Ids(len(bucket.objects)), MemoryState(), index, policy=policy).run()
    finally:
        index.close()


def bucket_of(snapshot: list[int]) -> Bucket:
    """Return a bucket with one snapshot of these chunks, and one pack that has all of them."""
    bucket = Bucket()
    index = RemoteIndex.open(None, threads=1)
    uploader = Uploader(bucket, Ids("uploader"), MemoryState(), index)
    uploader.begin()
    uploader.upload(dict.fromkeys(map(chunk, snapshot)), "cs-abcdef")
    index.close()
    return bucket


def test_the_sound_one_of_two_copies_stays() -> None:
    """Whichever of two packs with the same chunks has decayed, the other one is not deleted."""
    for at in (0, 1):
        bucket = bucket_of([1, 2])
        store_pack(bucket, SEALER, PackRef("d" + "77" * 16), [record(chunk(1)), record(chunk(2))])
        packs = sorted(ref for name in bucket.objects if (ref := parse_pack(name)))
        bucket.decay(pack_name(packs[at]), HEADER_BYTES)
        result = collect(bucket)
        assert readable(bucket) == {1, 2}
        # One of the two is chosen to go; where the sound one is, both stay, and the damage is told.
        assert bool(result.decayed) == (len(result.packs) == 0)


PACKS = st.lists(st.dictionaries(st.integers(0, 11), st.booleans(), min_size=1, max_size=6), max_size=8)


@settings(max_examples=150, deadline=None)
@given(packs=PACKS, data=st.data())
def test_no_readable_chunk_becomes_unreadable(packs: list[dict[int, bool]], data: st.DataObject) -> None:
    """With any records decayed, what could be read before a collection can be read after it."""
    bucket = bucket_of(list(range(12)))
    for number, chunks in enumerate(packs):
        # True: stored as a difference from the next chunk.
        records = [
            record(chunk(one), chunk((one + 1) % 12) if some else None) for one, some in chunks.items()
        ]
        store_pack(bucket, SEALER, PackRef(f"d{number:032x}"), records)
    refs = sorted(ref for name in bucket.objects if (ref := parse_pack(name)))
    for ref in data.draw(st.lists(st.sampled_from(refs), max_size=8)):
        size = len(bucket.objects[pack_name(ref)][0])
        records = len(RemotePackReader(SEALER, ref).read_table(bucket))
        assert size > HEADER_BYTES + 16 * records
        bucket.decay(pack_name(ref), HEADER_BYTES + data.draw(st.integers(0, 16 * records - 1)))
    before = readable(bucket)
    for _ in range(3):
        collect(bucket, data.draw(st.sampled_from([NO_REPACKING, NO_REPACKING._replace(repack_share=0.5)])))
        assert readable(bucket) >= before


def test_only_the_kept_copies_of_what_goes_are_read() -> None:
    """A collection reads one record for each needed chunk in the packs that go, and nothing where none has a copy."""
    bucket = bucket_of([1, 2, 3, 4])
    assert collect(bucket).checked_bytes == 0
    store_pack(bucket, SEALER, PackRef("d" + "77" * 16), [record(chunk(1)), record(chunk(2))])
    result = collect(bucket)
    assert (len(result.packs), result.checked_bytes) == (1, 32)
