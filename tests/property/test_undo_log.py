"""Tests of the undo log as bytes: whole records come back, and each question gets its true record."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.tracking.undo_log import UndoLog
from ciuic.fuse_layer.undo_format import (
    LOG_NAME,
    AbandonedRecord,
    BlocksRecord,
    InodeRecord,
    LogReader,
    NameRecord,
    OldStat,
    Record,
    SwappedRecord,
    UndoDamaged,
    UndoLost,
    bitmap_runs,
    encode,
)

_numbers = st.integers(0, 2**64 - 1)
_small = st.integers(1, 4)
_stats = st.builds(OldStat, *([_numbers] * 9))
_records: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        InodeRecord, _small, _small, _stats, st.dictionaries(st.binary(max_size=9), st.binary(max_size=9))
    ),
    st.builds(NameRecord, _small, _small, st.binary(min_size=1, max_size=3), _numbers, st.integers(0, 15)),
    st.builds(BlocksRecord, _small, _small, st.integers(0, 20), st.integers(1, 9)),
    st.builds(SwappedRecord, _small, _small, _small),
)


@given(st.lists(_records, max_size=20), st.lists(st.integers(1, 60), min_size=1), _small)
def test_a_log_read_in_pieces_gives_each_record_once(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], pieces: list[int], epoch: int
) -> None:
    """A log read in pieces, however far the writer is at each read, gives each record once and whole."""
    path = tmp_path_factory.mktemp("log") / "log"
    data = b"".join(encode(record) for record in records)
    reader = LogReader(os.fspath(path), epoch)
    seen = reader.poll()
    with path.open("ab", buffering=0) as log:
        at = index = 0
        while at < len(data):
            piece = data[at : at + pieces[index % len(pieces)]]
            log.write(piece)
            at += len(piece)
            index += 1
            seen += reader.poll()
    reader.close()
    assert seen == len(records)
    for record in records:
        if isinstance(record, InodeRecord):
            true = [
                r for r in records if isinstance(r, InodeRecord) and r.ino == record.ino and r.epoch >= epoch
            ]
            assert reader.inode(record.ino) == min(true, key=lambda r: r.epoch, default=None)
        elif isinstance(record, NameRecord):
            key = (record.dir_ino, record.name)
            names = [r for r in records if isinstance(r, NameRecord) and (r.dir_ino, r.name) == key]
            true_name = min((r for r in names if r.epoch >= epoch), key=lambda r: r.epoch, default=None)
            assert reader.name(*key) == true_name
            assert reader.names(record.dir_ino).get(record.name) == true_name


@given(st.lists(st.builds(BlocksRecord, st.just(1), _small, st.integers(0, 20), st.integers(1, 9))), _small)
def test_each_old_block_comes_from_the_smallest_epoch_that_is_not_older(
    tmp_path_factory: pytest.TempPathFactory, records: list[BlocksRecord], epoch: int
) -> None:
    """Each old block comes from the smallest epoch that is not older, in ordered runs that do not overlap."""
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(b"".join(encode(record) for record in records))
    reader = LogReader(os.fspath(path), epoch)
    reader.poll()
    reader.close()
    expected: dict[int, int] = {}
    for record in records:
        if record.epoch >= epoch:
            for block in range(record.first_block, record.first_block + record.count):
                expected[block] = min(record.epoch, expected.get(block, record.epoch))
    for first, stop in ((0, 40), (5, 11), (7, 8)):
        runs = reader.blocks(1, first, stop)
        found = [(block, run.epoch) for run in runs for block in range(run.first, run.stop)]
        assert found == sorted((b, e) for b, e in expected.items() if first <= b < stop)


def test_an_abandoned_log_stops_its_reader(tmp_path: Path) -> None:
    """A log that was abandoned, unlinked or cut short makes the reader stop."""
    for number, give_up in enumerate((_abandon, os.unlink, lambda path: os.truncate(path, 3))):
        path = tmp_path / f"log{number}"
        path.write_bytes(encode(NameRecord(1, 2, b"a", 0)))
        reader = LogReader(os.fspath(path), 2)
        assert reader.poll() == 1
        give_up(path)
        with pytest.raises(UndoLost):
            reader.poll()
        reader.close()


def _abandon(path: Path) -> None:
    with path.open("ab") as log:
        log.write(encode(AbandonedRecord(2, "no space")))


def test_an_abandoned_older_epoch_does_not_concern_a_newer_one(tmp_path: Path) -> None:
    """An older epoch that was abandoned before this epoch was cut does not affect it."""
    path = tmp_path / "log"
    path.write_bytes(encode(AbandonedRecord(1, "no space")))
    reader = LogReader(os.fspath(path), 2)
    assert reader.poll() == 1
    reader.close()


@pytest.mark.parametrize("damage", [b"\x01\0\0\0\xc1", b"\xff\xff\xff\xff", b"\x03\0\0\0\x92\xa1q"])
def test_damage_in_the_log_is_named(tmp_path: Path, damage: bytes) -> None:
    """A complete record that does not decode is an error and is never skipped."""
    path = tmp_path / "log"
    path.write_bytes(damage)
    reader = LogReader(os.fspath(path), 1)
    with pytest.raises(UndoDamaged):
        reader.poll()
    reader.close()


@given(st.sets(st.integers(0, 200)))
def test_a_bitmap_gives_its_blocks_low_bit_first(blocks: set[int]) -> None:
    """A bitmap gives its blocks low bit first, as the overlay writes it."""
    bitmap = bytearray(26)
    for block in blocks:
        bitmap[block >> 3] |= 1 << (block & 7)
    runs = list(bitmap_runs(bytes(bitmap)))
    assert [block for first, stop in runs for block in range(first, stop)] == sorted(blocks)


def test_the_first_records_of_an_epoch_may_come_at_one_instant(tmp_path: Path) -> None:
    """Several threads may start an epoch's log at the same time, and a reader sees the records of all."""
    fd = os.open(tmp_path, os.O_RDONLY)
    log = UndoLog(fd, block_size=4096, limit_bytes=1 << 30, on_abandon=lambda epochs, reason: None)
    try:
        for epoch in range(1, 40):
            log.begin(epoch)
            barrier = threading.Barrier(4)

            def save(directory: int, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                log.keep_absent(directory, b"name")

            threads = [threading.Thread(target=save, args=(1000 + number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            reader = LogReader(f"/proc/self/fd/{log.directory_fd}/{LOG_NAME}", epoch)
            assert reader.poll() == 4
            reader.close()
            log.end(epoch)
    finally:
        os.close(fd)


class _PausingUndoLog(UndoLog):
    """``keep_absent`` of the thread ``saver`` waits for ``go_on`` after it found a pending epoch."""

    saver: threading.Thread | None = None
    waits = threading.Event()
    go_on = threading.Event()

    @contextmanager
    def saving(self) -> Iterator[None]:
        with super().saving():
            if threading.current_thread() is self.saver:
                self.waits.set()
                self.go_on.wait(10)
            yield


def test_a_save_during_a_commit_keeps_the_log_of_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record being saved while its epoch ends does not hide the next epoch's records from their reader."""
    fd = os.open(tmp_path, os.O_RDONLY)
    log = _PausingUndoLog(fd, block_size=4096, limit_bytes=1 << 30, on_abandon=lambda epochs, reason: None)
    try:
        log.begin(1)
        log.keep_absent(1000, b"first")
        log.saver = saver = threading.Thread(target=lambda: log.keep_absent(1001, b"late"))
        saver.start()
        assert log.waits.wait(10)
        listed = os.listdir

        def save_while_it_clears(path: int) -> list[str]:
            monkeypatch.setattr(os, "listdir", listed)
            log.go_on.set()
            # The save may have to wait for the clearing to end.
            saver.join(0.5)
            return listed(path)

        monkeypatch.setattr(os, "listdir", save_while_it_clears)
        log.end(1)
        saver.join()
        log.begin(2)
        log.keep_absent(1002, b"second")
        reader = LogReader(f"/proc/self/fd/{log.directory_fd}/{LOG_NAME}", 2)
        reader.poll()
        reader.close()
        assert reader.name(1002, b"second") is not None
    finally:
        os.close(fd)
