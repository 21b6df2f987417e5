"""Capture is exact: whatever the job does while capture reads, the snapshot is the root as it was at the cut.

The overlay core runs on a plain directory, without a mount; operations are slipped in between capture's reads, at the
worst moment, just before it asks the undo log. What is stored is compared with a manifest taken at the cut.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.capture_bench import BLOCK, bench
from support.core_driver import Operation, operations

from ciuic import spill
from ciuic.daemon import capture_content
from ciuic.fuse_layer import swaps

MANY = settings(max_examples=2 * settings().max_examples)
"""An example takes milliseconds."""


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files and few changes already take the ways that are made for large ones and many."""
    monkeypatch.setattr(spill, "MOST_ENTRIES", 2)
    monkeypatch.setattr(swaps, "COPY_LIMIT_BYTES", BLOCK)
    monkeypatch.setattr(capture_content, "_RUN_BYTES", 2 * BLOCK)
    monkeypatch.setattr(capture_content, "_BATCH_BLOCKS", 2)


@MANY
@given(st.lists(st.tuples(operations(6, 24), operations(10, 40)), min_size=1, max_size=4))
def test_every_snapshot_is_the_root_at_its_cut(rounds: list[tuple[list[Operation], list[Operation]]]) -> None:
    """Full the first time, tracked from then on, and always exactly what was there at the cut."""
    with bench() as here:
        for before, meanwhile in rounds:
            here.run(before)
            record, report = here.capture(here.cut(), meanwhile)
            assert record.mode == ("full" if record.epoch in here.gaps else "tracked")
            here.check(record, report)


@MANY
@given(operations(7, 30), operations(5, 20), operations(5, 20), operations(7, 30), operations(7, 30))
def test_epochs_that_wait_together_are_each_exact(
    first: list[Operation],
    between: list[Operation],
    after: list[Operation],
    meanwhile: list[Operation],
    meanwhile_too: list[Operation],
) -> None:
    """Two sealed epochs wait at once, as when somebody asks for a snapshot during the hourly one."""
    with bench() as here:
        here.run(first)
        here.check(*here.capture(here.cut(), between))
        here.run(between)
        one = here.cut()
        here.run(after)
        two = here.cut()
        here.check(*here.capture(one, meanwhile))
        record, report = here.capture(two, meanwhile_too)
        assert record.mode == ("full" if record.epoch in here.gaps else "tracked")
        here.check(record, report)


@MANY
@given(operations(7, 30), operations(7, 30), operations(5, 20), operations(5, 20))
def test_an_epoch_that_was_given_up_is_in_the_next_snapshot(
    first: list[Operation], second: list[Operation], third: list[Operation], meanwhile: list[Operation]
) -> None:
    """Capture of one epoch fails; the next snapshot, still tracked, has its changes too."""
    with bench() as here:
        here.run(first)
        here.check(*here.capture(here.cut(), []))
        here.run(second)
        given_up = here.cut()
        here.run(third)
        here.core.abort(given_up)
        record, report = here.capture(here.cut(), meanwhile)
        assert record.mode == ("full" if record.epoch in here.gaps else "tracked")
        here.check(record, report)


def test_a_file_of_terabytes_without_data_is_one_look() -> None:
    """A hole over nothing costs what one hole costs, whatever its size; the file's size is stored, and its last bytes."""
    size, looks = 1 << 43, 0

    def look() -> None:
        nonlocal looks
        looks += 1

    with bench() as one:
        with open(one.backing / "large", "wb") as file:
            file.truncate(size)
            file.seek(-3, os.SEEK_END)
            file.write(b"end")
        record, report = one.capture(one.cut(observe=False), interfere=look)
        assert report.errors == []
        (entry,) = (
            entry for entry in one.repository.trees.entries(record.entry.content) if entry.name == b"large"
        )
        assert entry.size_bytes == size
        assert looks < 1000  # a look for each 16,384 blocks of the hole would be a hundred thousand
