"""Names in the undo directory, and what a successor takes over of it from a killed worker."""

from __future__ import annotations

import os

import pytest
from support.capture_bench import BLOCK, Bench, bench

from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.core.overlay_core import ROOT_ID
from ciuic.fuse_layer.system.caller import ROOT
from ciuic.fuse_layer.tracking import undo_log
from ciuic.fuse_layer.tracking.undo_log import read_undo
from ciuic.fuse_layer.undo_format import AbandonedRecord, LogReader

Operation = tuple[str, int, int, int]
WRITE_A: Operation = ("write", 0, 0, 1)
"""Inode number of the file `a`, which CoreDriver.furnish makes."""


def _undo(rig: Bench, name: str) -> str:
    return f"/proc/self/fd/{rig.core.undo_fd}/{name}"


def _append(rig: Bench, data: bytes) -> None:
    with open(_undo(rig, "log"), "ab") as log:
        log.write(data)


def test_epoch_without_later_changes_is_taken_over() -> None:
    """An epoch without changes since its cut, which has only a sealed file, is taken over."""
    with bench() as rig:
        rig.run([WRITE_A])
        epoch = rig.cut()
        assert rig.succeed()
        assert rig.core.status()["epoch"] == epoch + 1
        rig.run([WRITE_A, ("unlink", 0, 0, 0)])
        rig.check(*rig.capture(epoch))


def test_saved_blocks_are_not_saved_again() -> None:
    """A second write through the successor costs no second copy; the next snapshot has what came before it."""
    with bench() as rig:
        epoch = rig.cut()
        rig.run([WRITE_A, ("unlink", 10, 0, 0)])
        size = os.stat(_undo(rig, "log")).st_size
        assert rig.succeed()
        rig.run([WRITE_A])
        assert os.stat(_undo(rig, "log")).st_size == size
        rig.check(*rig.capture(epoch))
        rig.snapshot()


@pytest.mark.parametrize("dies", [False, True])
def test_what_is_saved_for_an_older_epoch_is_saved_for_the_newer(dies: bool) -> None:
    """The worker, or its successor, saves for the newer of two epochs what was saved only for the older."""
    with bench() as rig:
        one = rig.cut()
        rig.run([WRITE_A])
        two = rig.cut()
        assert not dies or rig.succeed()
        rig.run([("write", 0, 0, 2)])
        for epoch in (one, two):
            rig.check(*rig.capture(epoch))


@pytest.mark.parametrize("torn", [1, 4, 9])
def test_a_torn_record_is_cut_off(torn: int) -> None:
    """A torn record is cut off, so that records appended by the successor can be read."""
    with bench() as rig:
        epoch = rig.cut()
        rig.run([WRITE_A])
        _append(rig, undo_format.encode(AbandonedRecord(epoch, "a reason"))[:torn])
        assert rig.succeed()
        rig.run([("chmod", 1, 0, 3), ("write", 1, 0, 2)])
        rig.check(*rig.capture(epoch))


def test_copies_that_no_record_speaks_of_are_removed() -> None:
    """Copies of old blocks without a record are removed, and the successor copies them again."""
    with bench() as rig:
        epoch = rig.cut()
        ino = os.stat(rig.backing / "a").st_ino
        rig.run([("chmod", 1, 0, 3)])
        with open(_undo(rig, undo_format.blocks_name(ino, epoch)), "wb") as file:
            file.write(b"half")
        assert rig.succeed()
        rig.run([WRITE_A])
        assert rig.core.status()["pending"] == [epoch]
        rig.check(*rig.capture(epoch))


def test_the_number_of_a_removed_directory_counts_as_new() -> None:
    """The inode number of a removed directory counts as new, as another directory may have it by now."""
    with bench() as rig:
        os.mkdir(rig.backing / "gone")
        ino = os.stat(rig.backing / "gone").st_ino
        epoch = rig.cut()
        rig.core.names.rmdir(1, b"gone")
        assert rig.succeed()
        assert rig.core._state.tracker.is_fresh(ino)
        rig.check(*rig.capture(epoch))


def test_a_moved_directory_was_reached_through_the_dead_worker() -> None:
    """A log with a moved directory, whose descriptor died with the worker, is not taken over.

    The space is free, and the next snapshot is exact.
    """
    with bench() as rig:
        rig.cut()
        rig.run([("rename", 2, 28, 0)])
        assert any(record.fd >= 0 for record in _names(rig))
        assert not rig.succeed()
        assert os.listdir(_undo(rig, "")) == ["hold"]
        rig.snapshot()


def test_names_in_a_directory_made_after_the_cut_have_no_records() -> None:
    """Names in a directory made after the cut have no records there, only where they were at the cut.

    Such a directory may have the inode number of one removed since the cut, whose records these would seem to
    be.
    """
    with bench() as rig:
        names = rig.core.names
        rig.core.files.release(names.create(ROOT_ID, b"file", 0o600, os.O_RDWR, ROOT)[1])
        names.mkdir(ROOT_ID, b"folder", 0o700, ROOT)
        epoch = rig.cut()
        new = names.mkdir(ROOT_ID, b"new", 0o700, ROOT)
        for name in (b"file", b"folder"):
            names.rename(ROOT_ID, name, new.node, name, 0)
            names.rename(new.node, name, ROOT_ID, b"back-" + name, 0)
        log = LogReader(_undo(rig, "log"), epoch)
        log.poll()
        assert log.names(os.stat(rig.backing / "new").st_ino) == {}
        kept = log.names(os.stat(rig.backing).st_ino)
        assert {name for name, record in kept.items() if record.ino} == {b"file", b"folder"}
        log.close()


def _names(rig: Bench) -> list[undo_format.NameRecord]:
    with open(_undo(rig, "log"), "rb") as log:
        records = undo_format.decode_log(log.read())[0]
    return [record for record in records if isinstance(record, undo_format.NameRecord)]


def test_an_epoch_that_was_given_up_is_not_taken_up() -> None:
    """An epoch whose worker died between noting that it was given up and removing it is not taken over."""
    with bench() as rig:
        epoch = rig.cut()
        rig.run([WRITE_A])
        _append(rig, undo_format.encode(AbandonedRecord(epoch, "no space")))
        assert not rig.succeed()
        rig.snapshot()


def test_undecodable_log_is_not_taken_over() -> None:
    """A log with bytes that do not decode is not taken over."""
    with bench() as rig:
        rig.cut()
        rig.run([WRITE_A])
        _append(rig, b"\x03\0\0\0\xff\xff\xff")
        assert not rig.succeed()
        rig.snapshot()


def test_a_long_log_does_not_keep_the_job_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log beyond the limit is not read, as requests would wait; the exact instant is given up."""
    monkeypatch.setattr(undo_log, "MAX_LOG_BYTES", 10)
    with bench() as rig:
        rig.cut()
        rig.run([WRITE_A])
        assert not rig.succeed()
        rig.snapshot()


def test_blocks_of_another_size_are_not_taken_up() -> None:
    """Blocks of another size, after a change of repository, are not taken over."""
    with bench() as rig:
        rig.run([WRITE_A])
        rig.cut()
        assert read_undo(rig.core.undo_fd, 2 * BLOCK) is None
        assert read_undo(rig.core.undo_fd, BLOCK) is not None
