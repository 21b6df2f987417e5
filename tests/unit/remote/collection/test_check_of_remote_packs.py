"""Tests of the check of packs."""

from __future__ import annotations

import random

import pytest
from support.remote_world import Bucket, Ids, chunk, record, sealer, store_pack

from ciuic.remote.object_names import PackRef, pack_name
from ciuic.remote.upkeep.check import check_packs, listed_packs

SEALER = sealer(Ids("check"))
REFS = [PackRef("d" + letter * 32) for letter in "abcd"]


@pytest.fixture
def bucket() -> Bucket:
    made = Bucket()
    for number, ref in enumerate(REFS):
        store_pack(made, SEALER, ref, [record(chunk(number)), record(chunk(number + 1))])
    return made


@pytest.mark.parametrize("read_share", [0.0, 0.5, 1.0])
def test_good_packs_pass(bucket: Bucket, read_share: float) -> None:
    """Every pack is checked once, with its records, and none has a problem."""
    found = list(
        check_packs(bucket, SEALER, listed_packs(bucket), read_share=read_share, rng=random.Random(1))
    )
    assert sorted(pack.ref for pack in found) == REFS
    assert all(len(pack.records) == 2 and not pack.problem for pack in found)


@pytest.mark.parametrize(("at", "by_table"), [(70, False), (10, False), (-1, True), (-100, True)])
def test_changed_byte_is_found(bucket: Bucket, at: int, by_table: bool) -> None:
    """A change of the table shows without reading the pack; one of header or records when all of it is read."""
    bucket.decay(pack_name(REFS[2]), at)
    for read_share, seen in ((0.0, by_table), (1.0, True)):
        found = check_packs(bucket, SEALER, listed_packs(bucket), read_share=read_share)
        assert {pack.ref for pack in found if pack.problem} == ({REFS[2]} if seen else set())


def test_pack_that_goes_meanwhile_is_no_damage(bucket: Bucket) -> None:
    """A collector may delete packs while they are checked."""
    listed = listed_packs(bucket)
    bucket.delete([pack_name(REFS[0])])
    assert {pack.ref for pack in check_packs(bucket, SEALER, listed)} == set(REFS[1:])


def test_impossible_size_is_refused(bucket: Bucket) -> None:
    """A pack that is listed with more bytes than any pack has is not read."""
    (found,) = check_packs(bucket, SEALER, {REFS[0]: 1 << 40}, read_share=1.0)
    assert "which no pack has" in found.problem
