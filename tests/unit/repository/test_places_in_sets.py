"""Tests of what a snapshot file says of the set that the snapshot belongs to."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.repository.snapshot_format import StoredMarks as Marks
from ciuic.repository.snapshot_format import apply_marks, decode_snapshot, encode_snapshot
from ciuic.types import MAX_ITEMS, SetMember, Snapshot, SnapshotId

SET_ID = "0123456789abcdef" * 2
_LABELS = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=255)


def _with(member: SetMember) -> Snapshot:
    return Snapshot(id=SnapshotId.parse("cs-aaaaaa"), time_ns=1, host="node7", roots=(), set_member=member)


@given(name=_LABELS, members=st.sets(_LABELS, min_size=1, max_size=8), data=st.data())
def test_a_place_is_read_back_as_it_was_written(name: str, members: set[str], data: st.DataObject) -> None:
    """Any printable names of a set and its members come back, for each member."""
    member = SetMember(
        id=SET_ID,
        name=name,
        member=data.draw(st.sampled_from(sorted(members))),
        members=tuple(sorted(members)),
    )
    stored = decode_snapshot("cs-aaaaaa", encode_snapshot(_with(member), "r"), "r")
    assert apply_marks(stored, Marks(id=stored.id)).set_member == member


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": SET_ID[1:]},
        {"id": SET_ID.upper()},
        {"id": SET_ID + "\n"},
        {"name": ""},
        {"name": "two\nlines"},
        {"members": ()},
        {"members": ("b", "a")},
        {"members": ("a", "a", "b")},
        {"members": ("b", "c")},
        {"members": ("\x1b[2J", "a")},
        {"members": ("a", "n" * 256)},
        {"members": (*sorted(f"a{n}" for n in range(MAX_ITEMS)), "z"), "member": "z"},
    ],
    ids=lambda wrong: ",".join(wrong),
)
def test_an_impossible_place_is_refused(wrong: dict[str, object]) -> None:
    """Neither a writer nor a reader takes names that could not be shown or compared."""
    fields = {"id": SET_ID, "name": "nightly", "member": "a", "members": ("a", "b"), **wrong}
    assert set(str(fields["id"])) <= set(string.printable)
    with pytest.raises(ValueError, match="invalid snapshot"):
        encode_snapshot(_with(SetMember(**fields)), "r")  # type: ignore[arg-type]
