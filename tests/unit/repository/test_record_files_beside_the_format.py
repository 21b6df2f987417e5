"""Tests of small record files beside the format: whole or missing, and what damage means."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.repository.promised import DAMAGED, Promise, lost, promises, record_loss, record_promise
from ciuic.repository.record_files import read_note, write_note


class Note(msgspec.Struct):
    """A record for the tests."""

    text: str
    number: int = 0


@given(note=st.builds(Note, text=st.text(), number=st.integers(-(2**62), 2**62)), data=st.data())
def test_a_record_is_read_back_and_no_flipped_bit_is(
    tmp_path_factory: pytest.TempPathFactory, note: Note, data: st.DataObject
) -> None:
    """A record reads back, and one with a flipped bit or cut short reads as none."""
    directory = str(tmp_path_factory.mktemp("notes"))
    write_note(directory, "one", note, durable=data.draw(st.booleans()))
    assert read_note(directory, "one", Note) == note
    path = Path(directory, "one")
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert read_note(directory, "one", Note) is None
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert read_note(directory, "one", Note) is None


def test_a_record_replaces_its_predecessor_and_a_temporary_file(tmp_path: Path) -> None:
    """A record replaces the one before it, and a temporary file left by a killed writer."""
    write_note(str(tmp_path), "one", Note("first"), durable=True)
    (tmp_path / "one.tmp").write_bytes(b"half")
    write_note(str(tmp_path), "one", Note("second"), durable=True)
    assert read_note(str(tmp_path), "one", Note) == Note("second")
    assert os.listdir(tmp_path) == ["one"]


def test_a_record_that_is_missing_or_of_another_kind_is_none(tmp_path: Path) -> None:
    """A missing record and one of another kind read as none."""
    write_note(str(tmp_path), "one", Promise(id="cs-123456", time_ns=1), durable=False)
    assert read_note(str(tmp_path), "none", Note) is None
    assert read_note(str(tmp_path / "nowhere"), "one", Note) is None
    assert read_note(str(tmp_path), "one", Note) is None


def test_a_promise_whose_record_is_damaged_counts_as_given_up(tmp_path: Path) -> None:
    """A promise whose record is damaged counts as given up under the id in its file name."""
    record_promise(tmp_path, Promise(id="cs-aaaaaa", time_ns=1))
    record_promise(tmp_path, Promise(id="cs-bbbbbb", time_ns=2))
    record_loss(tmp_path, Promise(id="cs-cccccc", time_ns=3, reason="the disk was full", lost_ns=4))
    (tmp_path / "promised" / "cs-aaaaaa").write_bytes(b"")
    assert [(one.id, one.reason) for one in lost(tmp_path, ())] == [
        ("cs-aaaaaa", DAMAGED),
        ("cs-cccccc", "the disk was full"),
    ]
    assert {one.id for one in promises(tmp_path)} == {"cs-aaaaaa", "cs-bbbbbb", "cs-cccccc"}
    assert lost(tmp_path, {"cs-aaaaaa", "cs-cccccc"}) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_promise_that_cannot_be_looked_at_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A promise that a failing disk does not let read is left out, and `list` shows the others."""
    for id_ in ("cs-aaaaaa", "cs-bbbbbb"):
        record_loss(tmp_path, Promise(id=id_, time_ns=1, reason="the disk was full", lost_ns=2))
    damaged = tmp_path / "promised" / "cs-aaaaaa"
    damaged.write_bytes(b"")
    real = os.stat

    def stat(path: str | int, **options: bool) -> os.stat_result:
        if path == str(damaged):
            raise OSError(number, os.strerror(number))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert [one.id for one in lost(tmp_path, ())] == ["cs-bbbbbb"]
