"""Tests of the names of a remote's objects."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.remote import object_names

HEX = "0123456789abcdef" * 2


@given(st.text(max_size=200))
def test_labels_are_safe_names(text: str) -> None:
    """Any text becomes a label of 1 to 64 characters that is no hidden file and no way out of a directory."""
    label = object_names.as_label(text)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", label)
    assert object_names.as_label(label) == label


@given(
    st.text(max_size=100),
    st.text(max_size=100),
    st.none() | st.integers(0, object_names.MAX_STEP),
    st.none() | st.integers(0, object_names.MAX_STEP),
)
def test_names_of_manifests_are_parsed_again(
    job: str, host: str, epoch: int | None, step: int | None
) -> None:
    """The labels of a manifest come out of its name, whatever hyphens and dots they have."""
    found = object_names.parse_manifest(
        object_names.manifest_name(job=job, epoch=epoch, step=step, host=host)
    )
    assert found is not None
    assert found[:4] == (object_names.as_label(job), epoch or 0, step or 0, object_names.as_label(host))


@pytest.mark.parametrize(
    "name",
    [
        "manifests/../0-0/host-" + HEX,
        "manifests/job/0-0/..-" + HEX,
        "manifests/job/00-0/host-" + HEX,
        "manifests/job/0/host-" + HEX,
        "manifests/job/0-0/host-" + HEX + "\n",
        "manifests/job/0-0/host-" + HEX.upper(),
        "manifests/job/0-0/" + HEX,
        "manifests/job/0-0/x/host-" + HEX,
        "manifests/jöb/0-0/host-" + HEX,
        "manifests/" + "j" * 65 + "/0-0/host-" + HEX,
    ],
)
def test_other_names_are_no_manifests(name: str) -> None:
    """Names with directories, other digits, missing parts or line ends are not those of manifests."""
    assert object_names.parse_manifest(name) is None


def test_every_name_is_parsed_again() -> None:
    """Packs, slots, log entries and rounds come out of their names as they went in."""
    for kind in ("data", "meta"):
        ref = object_names.new_pack_ref(kind)
        assert object_names.parse_pack(object_names.pack_name(ref)) == ref
        assert object_names.pack_name(ref).startswith(object_names.pack_prefix(kind))
        assert object_names.split_ref(ref) == (kind, bytes.fromhex(ref[1:]))
        assert object_names.pack_ref(*object_names.split_ref(ref)) == ref
    assert object_names.parse_slot(object_names.slot_name("main-1")) == "main-1"
    for number in (0, 7, object_names.MAX_NUMBER):
        assert object_names.parse_log_entry(object_names.log_entry_name(HEX, number)) == (HEX, number)
        for part in ("begun", "final", "done"):
            assert object_names.parse_round(object_names.round_name(number, part)) == (number, part)
    assert object_names.repository_prefix(HEX) == f"repositories/{HEX}/"


def test_rounds_are_listed_in_their_order() -> None:
    """The objects of a round follow each other in a listing, before those of the next round."""
    listed = [
        object_names.round_name(number, part) for number in (9, 10, 11) for part in ("begun", "done", "final")
    ]
    assert sorted(listed) == listed


@pytest.mark.parametrize(
    "name",
    [
        "packs/data/00/" + HEX,
        "packs/other/01/" + HEX,
        "packs/data/01/" + HEX + "x",
        f"x/packs/data/01/{HEX}",
        f"w/{HEX}/1",
        f"w/{HEX}/00000000010",
        "gc/0000000001.other",
        "gc/1",
        "keys/Main",
        "keys/" + "a" * 33,
        "keys/",
        f"w/{HEX}/0000000001\n",
    ],
)
def test_other_objects_are_ignored(name: str) -> None:
    """Objects that are not ours have no meaning, and parsing them is no error."""
    parsers = (
        object_names.parse_pack,
        object_names.parse_log_entry,
        object_names.parse_round,
        object_names.parse_slot,
    )
    assert [parse(name) for parse in parsers] == [None] * 4


def test_impossible_names_are_not_made() -> None:
    """A name that could not be parsed again is refused when it is built."""
    for make in (
        lambda: object_names.pack_name("x" + HEX),
        lambda: object_names.pack_name("d" + HEX + "/"),
        lambda: object_names.slot_name("../x"),
        lambda: object_names.slot_name(""),
        lambda: object_names.log_entry_name("..", 0),
        lambda: object_names.log_entry_name(HEX, object_names.MAX_NUMBER + 1),
        lambda: object_names.round_name(-1),
        lambda: object_names.repository_prefix("x"),
        lambda: object_names.manifest_name(job="j", epoch=-1, step=0, host="h"),
        lambda: object_names.manifest_name(job="j", epoch=0, step=object_names.MAX_STEP + 1, host="h"),
        lambda: object_names.manifest_name(job="j", epoch=0, step=0, host="h", random="../" + HEX),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()
