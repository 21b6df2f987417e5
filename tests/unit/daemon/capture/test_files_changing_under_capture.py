"""Tests of files that change under capture without a record: content is consistent, and marked."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.capture_bench import BLOCK, Bench, bench

from ciuic.daemon.capture import content as capture_content
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials
from ciuic.fuse_layer.core.passthrough_writers import UnseenWriters
from ciuic.fuse_layer.sealed_format import read_sealed
from ciuic.fuse_layer.state.passthrough_state import OpenFile
from ciuic.fuse_layer.undo_format import sealed_name
from ciuic.system.spill import Spill
from ciuic.types import FLAG_NOT_HELD, RootRecord

ROOT = Credentials(0, 0)
SIZE = 12 * BLOCK + 100


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the run length, so that a file is read in many pieces with gaps between them."""
    monkeypatch.setattr(capture_content, "_RUN_BYTES", 2 * BLOCK)
    monkeypatch.setattr(capture_content, "_BATCH_BLOCKS", 2)


def writer_of(rig: Bench, name: bytes) -> tuple[int, int]:
    """Open a file past the overlay; return its handle and a descriptor like the kernel's, without clones."""
    rig.core._state.undo.clones = False
    handle = rig.core.names.create(ROOT_ID, name, 0o644, os.O_WRONLY, ROOT)[1]
    rig.core.files.is_unseen(handle)
    fd = rig.core.files.descriptor(handle)
    os.pwrite(fd, b"\x01" * SIZE, 0)
    return handle, fd


def check(rig: Bench, record: RootRecord, name: bytes) -> bytes:
    """Check that the file is marked and as long as its entry says; return the content."""
    entry = rig.entry_of(record, name)
    content = rig.repository.content(entry)
    assert len(content) == entry.size_bytes
    assert entry.ino in rig.flagged(record)
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
    """A file that changes while it is read is captured with the length in its entry, without error.

    Once its writer is gone, the next snapshot has exactly what the writer left.
    """
    with bench() as rig:
        handle, fd = writer_of(rig, b"moving")
        step = 0

        def interfere() -> None:
            nonlocal step
            step += 1
            CHANGES[how](fd, step)

        record, report = rig.capture(rig.cut(observe=False), interfere=interfere)
        assert report.errors == []
        assert step > 3
        content = check(rig, record, b"moving")
        assert set(content) <= {0, 1, 2}
        rig.core.files.release(handle)
        record, report = rig.snapshot()
        assert report.errors == []
        assert rig.flagged(record) == set()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20 * BLOCK)), min_size=1, max_size=30))
def test_any_sequence_of_sizes(steps: list[tuple[bool, int]]) -> None:
    """Any sequence of growing, truncating and writing between two reads gives consistent content."""
    with bench() as rig:
        handle, fd = writer_of(rig, b"moving")
        todo = iter(steps)

        def interfere() -> None:
            cuts, size = next(todo, (True, SIZE))
            if cuts:
                os.ftruncate(fd, size)
            else:
                os.pwrite(fd, b"\x03" * 50, size)

        record, report = rig.capture(rig.cut(observe=False), interfere=interfere)
        assert report.errors == []
        check(rig, record, b"moving")
        rig.core.files.release(handle)
        rig.snapshot()


def test_a_stranger_that_writes_under_the_overlay_is_marked_too() -> None:
    """A file written past the overlay by a process from before the mount is marked, as it changed."""
    with bench() as rig:
        (rig.backing / "behind").write_bytes(b"\x01" * SIZE)
        with open(rig.backing / "behind", "r+b", buffering=0) as stranger:
            step = 0

            def interfere() -> None:
                nonlocal step
                step += 1
                stranger.truncate(SIZE - step)

            record, report = rig.capture(rig.cut(observe=False), interfere=interfere)
        assert report.errors == []
        entry = rig.entry_of(record, b"behind")
        assert len(rig.repository.content(entry)) == entry.size_bytes
        assert entry.flags & FLAG_NOT_HELD
        assert record.not_held == 1


def test_cut_during_the_last_release_of_a_mapped_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes of a mapping after a cut during the last release are in the next snapshot."""
    with bench() as rig:
        handle = rig.core.names.create(ROOT_ID, b"m", 0o644, os.O_RDWR, ROOT)[1]
        rig.core.files.is_unseen(handle)
        mapping = os.open(rig.backing / "m", os.O_RDWR)
        ino = os.fstat(mapping).st_ino
        rig.core.committed(rig.core.cut().epoch)
        measured = UnseenWriters._measure

        def cut_there(writers: UnseenWriters, file: OpenFile) -> None:
            monkeypatch.setattr(UnseenWriters, "_measure", measured)
            rig.core.committed(rig.core.cut().epoch)
            measured(writers, file)

        monkeypatch.setattr(UnseenWriters, "_measure", cut_there)
        rig.core.files.release(handle)
        os.pwrite(mapping, b"later", 0)
        epoch = rig.core.cut().epoch
        spill = Spill(os.fspath(rig.repository.path))
        change = read_sealed(f"/proc/self/fd/{rig.core.undo_fd}/{sealed_name(epoch)}", spill).changes.get(ino)
        spill.close()
        os.close(mapping)
        assert change is not None
        assert change.data == 1
