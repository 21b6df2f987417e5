"""Tests of what counts as not stored, as rounds say."""

from __future__ import annotations

import pytest
from support.remote_world import Bucket, Ids, sealer

from ciuic.remote.documents import StoredRound, create_round
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import RolledBack, Rounds
from ciuic.remote.object_names import RoundPart, round_name

IDS = Ids("rounds")
SEALER = sealer(IDS)
A, B = "d" + "aa" * 16, "d" + "bb" * 16


def part(bucket: Bucket, round_: int, part: RoundPart, *packs: str) -> None:
    create_round(bucket, SEALER, round_, part, StoredRound(nonce=IDS.hex(), condemned=packs))


def whole(bucket: Bucket, round_: int, *packs: str) -> None:
    part(bucket, round_, "begun", *packs)
    part(bucket, round_, "final", *packs)
    part(bucket, round_, "done")


def test_what_is_rescued_counts_as_stored_again() -> None:
    """All of a round counts as not stored, and from its decision on what that names."""
    bucket = Bucket()
    rounds = Rounds(bucket, SEALER)
    rounds.refresh()
    assert rounds.version == 0
    part(bucket, 0, "begun", A, B)
    rounds.refresh()
    assert (rounds.condemned, rounds.unfinished, rounds.version) == ({A, B}, 0, 1)
    part(bucket, 0, "final", B)
    rounds.refresh()
    assert (rounds.condemned, rounds.unfinished, rounds.version) == ({B}, 0, 1)
    part(bucket, 0, "done")
    rounds.refresh()
    assert (rounds.unfinished, rounds.finished, rounds.deleted) == (None, 0, {B})
    rounds.forget()
    assert not rounds.condemned


def test_known_rounds_are_not_read_again() -> None:
    """A host that has applied a round reads only what follows."""
    bucket = Bucket()
    whole(bucket, 0, A)
    whole(bucket, 1, B)
    rounds = Rounds(bucket, SEALER, known=0)
    before = bucket.requests
    rounds.refresh()
    assert rounds.condemned == {B}
    # The listing, the round, and whether there is one after it.
    assert bucket.requests - before == 3


def test_new_index_skips_what_has_ended() -> None:
    """A host that lists all packs afterwards reads the round that is under way alone."""
    bucket = Bucket()
    for number in range(5):
        whole(bucket, number, A)
    part(bucket, 5, "begun", B)
    rounds = Rounds(bucket, SEALER, known=None)
    rounds.refresh()
    assert (rounds.condemned, rounds.finished, rounds.unfinished) == ({B}, 4, 5)


@pytest.mark.parametrize("known", [None, -1])
def test_made_up_end_of_a_round_is_refused(known: int | None) -> None:
    """A name alone, which needs no key, does not make a round count as ended."""
    bucket = Bucket()
    part(bucket, 0, "begun", A)
    bucket.create(round_name(0, "done"), b"made up")
    with pytest.raises(DamagedRemote):
        Rounds(bucket, SEALER, known=known).refresh()


def test_missing_round_is_noticed() -> None:
    """Rounds that were seen and are gone mean that the bucket is older than it was."""
    bucket = Bucket()
    whole(bucket, 0, A)
    rounds = Rounds(bucket, SEALER)
    rounds.refresh()
    bucket.delete([round_name(0, "done")])
    with pytest.raises(RolledBack):
        rounds.refresh()
    part(bucket, 0, "done")
    part(bucket, 1, "begun", B)
    rounds.refresh()
    bucket.delete([round_name(1)])
    with pytest.raises(RolledBack):
        rounds.refresh()


def test_large_number_does_not_make_a_reader_count() -> None:
    """A made up round of the largest number is refused at once."""
    bucket = Bucket()
    bucket.create(round_name(9_999_999_999), b"made up")
    with pytest.raises(DamagedRemote):
        Rounds(bucket, SEALER).refresh()
