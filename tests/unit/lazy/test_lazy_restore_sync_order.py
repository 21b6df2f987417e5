"""Syncs before each step of a lazy restore, so that a power cut leaves something to go on from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ciuic.lazy.changes import Change, ChangeJournals, Kind
from ciuic.lazy.filling import Settler
from ciuic.lazy.incomplete_files import PendingFiles, PendingName, PendingPiece
from ciuic.lazy.service import MARKER, LazyLayout, LazyPhase, LazyRecord
from ciuic.types import ChunkId

CHUNK = ChunkId(bytes(range(16)))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the calls that matter, as they come: name of the call, last part of the path."""
    found: list[tuple[str, str]] = []

    def recorded(name: str) -> None:
        real = getattr(os, name)

        def call(target: Any, *more: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fsdecode(target)
            found.append((name, os.path.basename(path)))
            return real(target, *more, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "unlink", "utime"):
        recorded(name)
    return found


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[LazyLayout]:
    place = tmp_path / "restored"
    place.mkdir()
    fd = os.open(place, os.O_RDONLY)
    made = LazyLayout(fd, os.fsencode(place))
    yield made
    made.close()
    os.close(fd)


def test_a_link_goes_after_the_content_is_durable(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    """A file counts as complete when its content, and then its time, have been synced."""
    shape = PendingName(1, CHUNK, 0, 10, 5)
    name = os.fsdecode(shape.encode())
    (tmp_path / name).write_bytes(bytes(10))
    os.link(tmp_path / name, tmp_path / "own name")
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        pending = PendingFiles(directory, 4096, ChangeJournals(directory))
        pending.add(shape, (tmp_path / name).stat().st_ino, is_new=True)
        (file,) = pending.files()
        pending.done(PendingPiece(file, 0, CHUNK))
        Settler(pending).settle(file)
    finally:
        os.close(directory)
    assert events == [("utime", name), ("fsync", name), ("unlink", name)]
    assert pending.is_over
    assert (tmp_path / "own name").stat().st_mtime_ns == 5


def test_a_journal_is_durable_under_its_name(layout: LazyLayout, events: list[tuple[str, str]]) -> None:
    """A durable record, and a journal that is written anew, are synced with their names before the call returns."""
    journals = ChangeJournals(layout.changes)
    journals.append(b"a", Change(Kind.TIME, 0, 0, 1), durable=True)
    assert events == [("fsync", "a"), ("fsync", "changes")]
    events.clear()
    journals.replace(b"a", [Change(Kind.TIME, 0, 0, 2)])
    done = [event for event in events if event[0] != "unlink"]
    assert done == [("fsync", "a.tmp"), ("rename", "a.tmp"), ("fsync", "changes")]


def test_a_record_is_durable_under_its_name(layout: LazyLayout, events: list[tuple[str, str]]) -> None:
    """The bytes of a record are synced before it gets its name, and its name before the call returns."""
    layout.write(LazyRecord("cs-1", "00", True))
    done = [event for event in events if event[0] != "unlink"]
    assert done == [("fsync", "record.tmp"), ("rename", "record.tmp"), ("fsync", "lazy-restore")]


def test_the_mark_goes_after_the_names_are_durable(
    layout: LazyLayout, events: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Names in the destination are synced before the mark of an incomplete restore goes, and its times last of all."""
    record = LazyRecord("cs-1", "00", True, LazyPhase.FILLING)
    layout.mark()
    os.mkdir("root", dir_fd=layout.tree)
    content = layout.open_tree(b"root")
    try:
        with open(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=content), "w") as file:
            file.write("x")
        layout.finish(record, content)
    finally:
        os.close(content)
    assert events.index(("fsync", "restored")) < events.index(("unlink", os.fsdecode(MARKER)))
    assert events[-2:] == [("utime", "restored"), ("fsync", "restored")]
    assert os.listdir(tmp_path / "restored") == ["file"]
