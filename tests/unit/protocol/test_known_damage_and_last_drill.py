"""Records of known damage and of the last drill: what was found stands until it is refuted, and a hostile record is none."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stored import flip

from ciuic.protocol.known_damage import (
    NAME,
    DamagedPlace,
    damage_status,
    damage_words,
    note_damage,
    read_damage,
    touched_snapshots,
)
from ciuic.protocol.last_drill import LastDrill, read_last_drill, write_last_drill
from ciuic.protocol.stored_remotely import StoredRecord, read_record, write_record
from ciuic.types import SnapshotId


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a directory with the names of two snapshots."""
    for id_ in ("cs-aaaaaa", "cs-bbbbbb"):
        (tmp_path / "snapshots").mkdir(exist_ok=True)
        (tmp_path / "snapshots" / id_).touch()
    return tmp_path


def place(where: str, *snapshots: str, time_ns: int = 1) -> DamagedPlace:
    return DamagedPlace(
        where=where, reason="bad", snapshots=snapshots, by="verify", found_ns=time_ns, seen_ns=time_ns
    )


def test_damage_stands_until_it_is_refuted(home: Path) -> None:
    """A place that is found again is one place, of all its snapshots, since the first time; a record without places is as none."""
    note_damage(home, [])
    assert not (home / NAME).exists()
    note_damage(home, [place("/a", "cs-aaaaaa"), place("/b", "cs-bbbbbb")])
    note_damage(home, [place("/a", SnapshotId("cs-bbbbbb"), time_ns=5)])
    first, second = read_damage(home)
    assert first == msgspec.structs.replace(place("/a", "cs-bbbbbb", "cs-aaaaaa", time_ns=1), seen_ns=5)
    assert second == place("/b", "cs-bbbbbb")
    note_damage(home, [], refuted=lambda known: known.seen_ns < 5)
    assert read_damage(home) == [first]
    note_damage(home, [], refuted=lambda known: True)
    assert read_damage(home) == []
    assert damage_status(read_damage(home)) is None


def test_damage_of_removed_snapshots_is_none(home: Path) -> None:
    """A place is known for as long as one of its snapshots exists; what belongs to none stays."""
    note_damage(home, [place("/a", "cs-aaaaaa", "cs-bbbbbb"), place("/b", "cs-aaaaaa"), place("/pack")])
    (home / "snapshots/cs-aaaaaa").unlink()
    assert [one.where for one in read_damage(home)] == ["/a", "/pack"]


def test_no_snapshot_is_forgotten_however_many_places_there_are(home: Path) -> None:
    """A third of the packs gone are thousands of files: the record is bounded, and names all snapshots that they touch."""
    ids = [f"cs-{number:06x}" for number in range(3000)]
    for id_ in ids:
        (home / "snapshots" / id_).touch()
    for _ in range(2):
        note_damage(home, [place(f"/{id_}" + "é" * 2000, id_) for id_ in ids])
        assert touched_snapshots(read_damage(home)) == set(ids)
        assert len(read_damage(home)) == 200


def test_two_writers_lose_nothing_of_each_other(home: Path) -> None:
    """Each of many writers at once finds its place in the record."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: note_damage(home, [place(f"/{number}")]), range(40)))
    assert {one.where for one in read_damage(home)} == {f"/{number}" for number in range(40)}


@given(at=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_damaged_record_is_damage(tmp_path_factory: pytest.TempPathFactory, at: float, mask: int) -> None:
    """Whatever byte of the record is flipped: it says the same, or that it cannot be read, and never that nothing is damaged."""
    home = tmp_path_factory.mktemp("home")
    note_damage(home, [place("/a"), place("/b")])
    told = read_damage(home)
    flip(home / NAME, int(at * (home / NAME).stat().st_size), mask)
    found = read_damage(home)
    assert found == told or "cannot be read" in found[0].reason
    note_damage(home, [place("/c")])
    assert read_damage(home)[0].where == "/c"
    assert len(read_damage(home)) == 1 + len(found)
    note_damage(home, [], refuted=lambda known: True)
    assert read_damage(home) == []


def test_the_words_name_places_snapshots_and_finder(home: Path) -> None:
    """The sentence counts the places, and names three snapshots and the place that was found last."""
    note_damage(home, [place("/a", *(f"cs-aaaaa{digit}" for digit in "abcd"))])
    damage = damage_status(read_damage(home))
    assert damage is not None
    assert damage_words(damage) == (
        "the repository has 1 damaged place, in cs-aaaaaa, cs-aaaaab, cs-aaaaac, …; found last by ciuic verify: /a: bad"
    )


GOOD = LastDrill(time_ns=7, verdict="good", seconds=1.5, snapshot="cs-abcdef", files=3, bytes_read=9)


def test_the_last_drill_is_read_back_beside_the_record_of_the_upload(tmp_path: Path) -> None:
    """The newest outcome replaces the one before, and leaves what the process that uploads has noted."""
    stored = StoredRecord(repository="ab" * 16, stored=frozenset({"cs-abcdef"}))
    write_record("nas", stored, tmp_path)
    assert read_last_drill("nas", tmp_path) is None
    write_last_drill("nas", GOOD, tmp_path)
    assert read_last_drill("nas", tmp_path) == GOOD
    bad = LastDrill(time_ns=8, verdict="damaged", seconds=2, reason="x" * 100_000)
    write_last_drill("nas", bad, tmp_path)
    read = read_last_drill("nas", tmp_path)
    assert read is not None
    assert (read.time_ns, read.is_good, len(read.reason)) == (8, False, 1000)
    assert read_record("nas", tmp_path) == stored
    assert sorted(os.listdir(tmp_path / "nas")) == ["drill", "stored"]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"time_ns":-1,"verdict":"good","seconds":1}']
)
def test_what_is_no_record_is_none(tmp_path: Path, content: bytes) -> None:
    """A record that is cut, empty or made up says nothing of a drill; nor do a link and a pipe."""
    (tmp_path / "nas").mkdir()
    path = tmp_path / "nas/drill"
    path.write_bytes(content)
    assert read_last_drill("nas", tmp_path) is None
    path.unlink()
    os.mkfifo(path)
    assert read_last_drill("nas", tmp_path) is None
    path.unlink()
    write_last_drill("other", GOOD, tmp_path)
    path.symlink_to(tmp_path / "other/drill")
    assert read_last_drill("nas", tmp_path) is None
