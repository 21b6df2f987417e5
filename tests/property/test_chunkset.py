"""Tests that the compact set of chunks forgets nothing."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ciuic.maintenance.chunkset import ChunkSet
from ciuic.types import ChunkId


@given(
    st.lists(st.binary(min_size=16, max_size=16), max_size=200), st.lists(st.binary(min_size=16, max_size=16))
)
def test_a_chunkset_holds_exactly_what_was_added(added: list[bytes], lookups: list[bytes]) -> None:
    """The set holds exactly what was added, up to ids that share their first eight bytes."""
    chunks = ChunkSet()
    for chunk in added:
        chunks.add(ChunkId(chunk))
    starts = {chunk[:8] for chunk in added}
    assert all(chunk in chunks for chunk in added)
    zero_and_one = {bytes(8), (1).to_bytes(8, "little")}
    for chunk in lookups:
        shared = chunk[:8] in starts or (chunk[:8] in zero_and_one and starts & zero_and_one)
        assert (chunk in chunks) == bool(shared)


def test_growth_keeps_everything() -> None:
    """Through many growths every id stays, none is invented, and memory stays near 16 bytes an id."""
    source = random.Random(1)
    ids = [ChunkId(source.randbytes(16)) for _ in range(50_000)]
    chunks = ChunkSet()
    for chunk in ids:
        chunks.add(chunk)
        chunks.add(chunk)
    assert len(chunks) == len(ids)
    assert all(chunk in chunks for chunk in ids)
    assert not any(source.randbytes(16) in chunks for _ in range(50_000))
    assert len(chunks._slots) * 8 <= len(ids) * 16


def test_ids_at_the_end_of_the_table_wrap_round() -> None:
    """Ids that hash to the end of the table wrap round and are still found."""
    chunks = ChunkSet()
    ids = [ChunkId(((1 << 64) - 1 - n).to_bytes(8, "little") + bytes(8)) for n in range(300)]
    for chunk in ids:
        chunks.add(chunk)
    assert all(chunk in chunks for chunk in ids)
    assert ChunkId(bytes(16)) not in chunks
