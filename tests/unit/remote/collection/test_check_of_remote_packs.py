"""Tests of reading the tables of packs, as a check and the index do."""

from __future__ import annotations

import pytest
from support.remote_world import Bucket, Ids, chunk, record, sealer, store_pack

from ciuic.errors import CiuicError
from ciuic.remote.object_names import PackRef, pack_name
from ciuic.remote.remote_index import list_packs, read_tables

SEALER = sealer(Ids("check"))
REFS = [PackRef("d" + letter * 32) for letter in "abcd"]


@pytest.fixture
def bucket() -> Bucket:
    made = Bucket()
    for number, ref in enumerate(REFS):
        store_pack(made, SEALER, ref, [record(chunk(number)), record(chunk(number + 1))])
    return made


def damaged(bucket: Bucket, threads: int = 8) -> set[PackRef]:
    listed = list_packs(bucket)
    found = read_tables(bucket, SEALER, listed, listed, threads)
    return {ref for ref, records in found if isinstance(records, CiuicError)}


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_good_packs_pass(bucket: Bucket, threads: int) -> None:
    """Every table is read once, with its records, and none has a problem."""
    listed = list_packs(bucket)
    found = list(read_tables(bucket, SEALER, listed, listed, threads))
    assert [ref for ref, _ in found] == REFS
    assert all(isinstance(records, list) and len(records) == 2 for _, records in found)


@pytest.mark.parametrize(("at", "by_table"), [(70, False), (10, False), (-1, True), (-100, True)])
def test_changed_byte_is_found(bucket: Bucket, at: int, by_table: bool) -> None:
    """A change of the table shows without reading the pack; one of header or records does not."""
    bucket.decay(pack_name(REFS[2]), at)
    assert damaged(bucket) == ({REFS[2]} if by_table else set())


def test_pack_that_goes_meanwhile_is_no_damage(bucket: Bucket) -> None:
    """A collector may delete packs while they are checked."""
    listed = list_packs(bucket)
    bucket.delete([pack_name(REFS[0])])
    found = dict(read_tables(bucket, SEALER, listed, listed, 8))
    assert {ref for ref, records in found.items() if records is None} == {REFS[0]}
    assert damaged(bucket) == set()
