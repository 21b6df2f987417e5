"""Files that change under capture, and no record says so: what is stored agrees with itself, and is marked."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.capture_bench import BLOCK, Bench, bench

from ciuic.daemon import capture_content
from ciuic.fuse_layer.core import ROOT_ID, Caller
from ciuic.fuse_layer.sealed_format import read_sealed
from ciuic.fuse_layer.state import OpenFile
from ciuic.fuse_layer.undo_format import sealed_name
from ciuic.fuse_layer.unseen import UnseenWriters
from ciuic.spill import Spill
from ciuic.types import FLAG_NOT_HELD, Entry, RootRecord

ROOT = Caller(0, 0)
SIZE = 12 * BLOCK + 100


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is read in many pieces, so that there is something between them."""
    monkeypatch.setattr(capture_content, "_RUN_BYTES", 2 * BLOCK)
    monkeypatch.setattr(capture_content, "_BATCH_BLOCKS", 2)


def writer_of(here: Bench, name: bytes) -> tuple[int, int]:
    """A file that somebody writes past the overlay: its handle, and a descriptor as the kernel has one. No clones."""
    here.core._state.undo.clones = False
    handle = here.core.create(ROOT_ID, name, 0o644, os.O_WRONLY, ROOT)[1]
    here.core.is_unseen(handle)
    fd = here.core.descriptor(handle)
    os.pwrite(fd, b"\x01" * SIZE, 0)
    return handle, fd


def entry_of(here: Bench, record: RootRecord, name: bytes) -> Entry:
    found = here.repository.trees.entry(record.entry.content, name)
    assert found is not None
    return found


def check(here: Bench, record: RootRecord, name: bytes) -> bytes:
    """Marked, and as long as it says; the content."""
    entry = entry_of(here, record, name)
    content = here.repository.content(entry)
    assert len(content) == entry.size_bytes
    assert entry.ino in here.flagged(record)
    return content


CHANGES: dict[str, Callable[[int, int], object]] = {
    "grows": lambda fd, step: os.pwrite(fd, b"\x02" * BLOCK, SIZE + step * BLOCK),
    "shrinks": lambda fd, step: os.ftruncate(fd, max(0, SIZE - step * BLOCK)),
    "vanishes": lambda fd, step: os.ftruncate(fd, 0),
    "by turns": lambda fd, step: os.ftruncate(fd, SIZE * (step % 3)),
    "is punched": lambda fd, step: (os.ftruncate(fd, 0), os.pwrite(fd, b"\x02", SIZE)),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_while_it_is_read(how: str) -> None:
    """Whatever its writer does, there is no error, the content has the length that the entry names, and the next snapshot, when
    the writer is gone, has exactly what it left."""
    with bench() as here:
        handle, fd = writer_of(here, b"moving")
        step = 0

        def interfere() -> None:
            nonlocal step
            step += 1
            CHANGES[how](fd, step)

        record, report = here.capture(here.cut(observe=False), interfere=interfere)
        assert report.errors == []
        assert step > 3
        content = check(here, record, b"moving")
        assert set(content) <= {0, 1, 2}
        here.core.release(handle)
        record, report = here.snapshot()
        assert report.errors == []
        assert here.flagged(record) == set()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20 * BLOCK)), min_size=1, max_size=30))
def test_any_sequence_of_sizes(steps: list[tuple[bool, int]]) -> None:
    """Grown, cut short, written in the middle, between any two reads."""
    with bench() as here:
        handle, fd = writer_of(here, b"moving")
        todo = iter(steps)

        def interfere() -> None:
            cuts, size = next(todo, (True, SIZE))
            if cuts:
                os.ftruncate(fd, size)
            else:
                os.pwrite(fd, b"\x03" * 50, size)

        record, report = here.capture(here.cut(observe=False), interfere=interfere)
        assert report.errors == []
        check(here, record, b"moving")
        here.core.release(handle)
        here.snapshot()


def test_a_stranger_that_writes_under_the_overlay_is_marked_too() -> None:
    """Somebody who was there before the mount, whom nobody tracks: the file is marked because it moved while it was read."""
    with bench() as here:
        (here.backing / "behind").write_bytes(b"\x01" * SIZE)
        with open(here.backing / "behind", "r+b", buffering=0) as stranger:
            step = 0

            def interfere() -> None:
                nonlocal step
                step += 1
                stranger.truncate(SIZE - step)

            record, report = here.capture(here.cut(observe=False), interfere=interfere)
        assert report.errors == []
        entry = entry_of(here, record, b"behind")
        assert len(here.repository.content(entry)) == entry.size_bytes
        assert entry.flags & FLAG_NOT_HELD
        assert record.not_held == 1


def test_a_cut_beside_the_close_of_what_stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut falls into the release of the last handle: what the mapping writes after it is in the next snapshot."""
    with bench() as here:
        handle = here.core.create(ROOT_ID, b"m", 0o644, os.O_RDWR, ROOT)[1]
        here.core.is_unseen(handle)
        mapping = os.open(here.backing / "m", os.O_RDWR)
        ino = os.fstat(mapping).st_ino
        here.core.committed(here.core.cut().epoch)
        measured = UnseenWriters._measure

        def cut_there(writers: UnseenWriters, file: OpenFile) -> None:
            monkeypatch.setattr(UnseenWriters, "_measure", measured)
            here.core.committed(here.core.cut().epoch)
            measured(writers, file)

        monkeypatch.setattr(UnseenWriters, "_measure", cut_there)
        here.core.release(handle)
        os.pwrite(mapping, b"later", 0)
        epoch = here.core.cut().epoch
        spill = Spill(os.fspath(here.repository.path))
        change = read_sealed(f"/proc/self/fd/{here.core.undo_fd}/{sealed_name(epoch)}", spill).changes.get(
            ino
        )
        spill.close()
        os.close(mapping)
        assert change is not None
        assert change.data == 1
