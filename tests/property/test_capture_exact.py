"""Capture is exact: whatever the job does during capture, the snapshot is the root as it was at the cut.

The overlay core runs on a plain directory, without a mount; operations are slipped in between capture's
reads, at the worst moment, just before it asks the undo log. What is stored is compared with a manifest taken
at the cut.
"""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st
from support.capture_bench import bench
from support.capture_bench import small_limits as small_limits
from support.core_driver import Operation, operations
from support.depth import by_depth

MANY = settings(max_examples=by_depth(1, 2) * settings().max_examples)
"""An example takes milliseconds."""


@MANY
@given(st.lists(st.tuples(operations(6, 24), operations(10, 40)), min_size=1, max_size=4))
def test_every_snapshot_is_the_root_at_its_cut(rounds: list[tuple[list[Operation], list[Operation]]]) -> None:
    """Every snapshot, the full first one and the tracked ones after it, is exactly the root at its cut."""
    with bench() as rig:
        for before, meanwhile in rounds:
            rig.run(before)
            record, report = rig.capture(rig.cut(), meanwhile)
            assert record.mode == ("full" if record.epoch in rig.gaps else "tracked")
            rig.check(record, report)


@MANY
@given(operations(7, 30), operations(5, 20), operations(5, 20), operations(7, 30), operations(7, 30))
def test_two_waiting_epochs_are_each_exact(
    first: list[Operation],
    between: list[Operation],
    after: list[Operation],
    meanwhile: list[Operation],
    meanwhile_too: list[Operation],
) -> None:
    """Two sealed epochs that wait together, as with a request during the hourly one, are each exact."""
    with bench() as rig:
        rig.run(first)
        rig.check(*rig.capture(rig.cut(), between))
        rig.run(between)
        one = rig.cut()
        rig.run(after)
        two = rig.cut()
        rig.check(*rig.capture(one, meanwhile))
        record, report = rig.capture(two, meanwhile_too)
        assert record.mode == ("full" if record.epoch in rig.gaps else "tracked")
        rig.check(record, report)


@MANY
@given(operations(7, 30), operations(7, 30), operations(5, 20), operations(5, 20))
def test_an_epoch_that_was_given_up_is_in_the_next_snapshot(
    first: list[Operation], second: list[Operation], third: list[Operation], meanwhile: list[Operation]
) -> None:
    """The changes of an epoch whose capture failed are in the next snapshot, which is still tracked."""
    with bench() as rig:
        rig.run(first)
        rig.check(*rig.capture(rig.cut(), []))
        rig.run(second)
        given_up = rig.cut()
        rig.run(third)
        rig.core.abort(given_up)
        record, report = rig.capture(rig.cut(), meanwhile)
        assert record.mode == ("full" if record.epoch in rig.gaps else "tracked")
        rig.check(record, report)


def test_a_file_of_terabytes_without_data_is_one_look() -> None:
    """A hole costs the same number of seeks at any size, and the file's size and last bytes are stored."""
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
        # One seek for each 16,384 blocks of the hole would be a hundred thousand.
        assert looks < 1000
