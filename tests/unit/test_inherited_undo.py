"""What a successor takes up of a killed worker's undo directory, and when it takes up nothing."""

from __future__ import annotations

import os

import pytest
from support.capture_bench import BLOCK, Bench, bench

from ciuic.fuse_layer import inherited_undo, undo_format
from ciuic.fuse_layer.inherited_undo import read_undo
from ciuic.fuse_layer.undo_format import AbandonedRecord

Operation = tuple[str, int, int, int]
WRITE_A: Operation = ("write", 0, 0, 1)
"""Of the file `a`, which CoreDriver.furnish makes."""


def _undo(here: Bench, name: str) -> str:
    return f"/proc/self/fd/{here.core.undo_fd}/{name}"


def _append(here: Bench, data: bytes) -> None:
    with open(_undo(here, "log"), "ab") as log:
        log.write(data)


def test_an_epoch_that_nothing_was_changed_since_is_taken_up() -> None:
    """There is no log yet: the sealed file is all there is."""
    with bench() as here:
        here.run([WRITE_A])
        epoch = here.cut()
        assert here.succeed()
        assert here.core.status()["epoch"] == epoch + 1
        here.run([WRITE_A, ("unlink", 0, 0, 0)])
        here.check(*here.capture(epoch))


def test_what_is_saved_is_not_saved_again() -> None:
    """The successor knows names, attributes and blocks that have a record; a second write costs no second copy."""
    with bench() as here:
        epoch = here.cut()
        here.run([WRITE_A, ("unlink", 10, 0, 0)])
        size = os.stat(_undo(here, "log")).st_size
        assert here.succeed()
        here.run([WRITE_A])
        assert os.stat(_undo(here, "log")).st_size == size
        here.check(*here.capture(epoch))


@pytest.mark.parametrize("torn", [1, 4, 9])
def test_a_torn_record_is_cut_off(torn: int) -> None:
    """Records that the successor appends can be read: they do not follow half a record."""
    with bench() as here:
        epoch = here.cut()
        here.run([WRITE_A])
        _append(here, undo_format.encode(AbandonedRecord(epoch, "a reason"))[:torn])
        assert here.succeed()
        here.run([("chmod", 1, 0, 3), ("write", 1, 0, 2)])
        here.check(*here.capture(epoch))


def test_copies_that_no_record_speaks_of_are_removed() -> None:
    """The worker died between a copy of old blocks and its record: the successor copies them once more."""
    with bench() as here:
        epoch = here.cut()
        ino = os.stat(here.backing / "a").st_ino
        here.run([("chmod", 1, 0, 3)])
        with open(_undo(here, undo_format.blocks_name(ino, epoch)), "wb") as file:
            file.write(b"half")
        assert here.succeed()
        here.run([WRITE_A])
        assert here.core.status()["pending"] == [epoch]
        here.check(*here.capture(epoch))


def test_the_number_of_a_removed_directory_counts_as_new() -> None:
    """Another directory may have it by now, and names in that one must not be taken for names in the removed one."""
    with bench() as here:
        os.mkdir(here.backing / "gone")
        ino = os.stat(here.backing / "gone").st_ino
        epoch = here.cut()
        here.core.rmdir(1, b"gone")
        assert here.succeed()
        assert here.core._state.tracker.is_fresh(ino)
        here.check(*here.capture(epoch))


def test_a_moved_directory_was_reached_through_the_dead_worker() -> None:
    """Its descriptor is gone: nothing is taken up, the space is free, and the next snapshot is exact."""
    with bench() as here:
        here.cut()
        here.run([("rename", 2, 28, 0)])
        assert any(record.fd >= 0 for record in _names(here))
        assert not here.succeed()
        assert os.listdir(_undo(here, "")) == ["hold"]
        here.snapshot()


def _names(here: Bench) -> list[undo_format.NameRecord]:
    with open(_undo(here, "log"), "rb") as log:
        records = undo_format.decode_log(log.read())[0]
    return [record for record in records if isinstance(record, undo_format.NameRecord)]


def test_an_epoch_that_was_given_up_is_not_taken_up() -> None:
    """The worker died between its note and the removal of the sealed file."""
    with bench() as here:
        epoch = here.cut()
        here.run([WRITE_A])
        _append(here, undo_format.encode(AbandonedRecord(epoch, "no space")))
        assert not here.succeed()
        here.snapshot()


def test_a_log_that_is_not_what_it_should_be_is_not_taken_up() -> None:
    """Bytes that do not decode: nothing that follows can be trusted."""
    with bench() as here:
        here.cut()
        here.run([WRITE_A])
        _append(here, b"\x03\0\0\0\xff\xff\xff")
        assert not here.succeed()
        here.snapshot()


def test_a_long_log_does_not_keep_the_job_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait while it is read: beyond the limit the exact instant is given up instead."""
    monkeypatch.setattr(inherited_undo, "MAX_LOG_BYTES", 10)
    with bench() as here:
        here.cut()
        here.run([WRITE_A])
        assert not here.succeed()
        here.snapshot()


def test_blocks_of_another_size_are_not_taken_up() -> None:
    """A service whose repository has another block size now."""
    with bench() as here:
        here.run([WRITE_A])
        here.cut()
        assert read_undo(here.core.undo_fd, 2 * BLOCK) is None
        assert read_undo(here.core.undo_fd, BLOCK) is not None
