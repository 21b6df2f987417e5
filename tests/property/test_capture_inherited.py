"""What a worker had sealed when it was killed is captured exactly by its successor, whatever both had changed since."""

from __future__ import annotations

import os
from contextlib import ExitStack
from unittest import mock

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.capture_bench import BLOCK, Bench, bench
from support.core_driver import Operation, operations
from support.dying_os import DATA_CALLS, NAME_CALLS, DyingOs, Killed, Steps

from ciuic import spill
from ciuic.daemon import capture_content
from ciuic.fuse_layer import (
    attributes,
    data,
    directories,
    hidden_links,
    namespace,
    node_ways,
    state,
    swaps,
    syscalls,
    undo,
    undo_format,
    ways,
)

pytestmark = pytest.mark.keeps_descriptors("a worker that dies within a call closes nothing")

MODULES = (
    attributes,
    data,
    directories,
    hidden_links,
    namespace,
    node_ways,
    state,
    swaps,
    syscalls,
    undo,
    ways,
)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files and few changes already take the ways that are made for large ones and many."""
    monkeypatch.setattr(spill, "MOST_ENTRIES", 2)
    monkeypatch.setattr(swaps, "COPY_LIMIT_BYTES", BLOCK)
    monkeypatch.setattr(capture_content, "_RUN_BYTES", 2 * BLOCK)
    monkeypatch.setattr(capture_content, "_BATCH_BLOCKS", 2)


def _killed_at(here: Bench, operation: Operation, step: int) -> bool:
    """Whether the worker died within the operation."""
    dying = DyingOs(Steps(step), NAME_CALLS | DATA_CALLS)
    with ExitStack() as patched:
        for module in MODULES:
            patched.enter_context(mock.patch.object(module, "os", dying))
        try:
            here.driver.do(operation)
        except Killed:
            return True
    return False


def _succeeds(here: Bench) -> bool:
    taken_up = here.succeed()
    event("taken up" if taken_up else "lost")
    return taken_up


@settings(deadline=None)
@given(operations(6, 24), operations(0, 24), operations(0, 24), operations(5, 30), st.booleans())
def test_a_sealed_epoch_outlives_its_worker(
    before: list[Operation],
    after: list[Operation],
    later: list[Operation],
    meanwhile: list[Operation],
    snapshot_first: bool,
) -> None:
    """Cut, changes, death, changes by the successor before and during the capture: what is stored is the root at the cut."""
    with bench() as here:
        if snapshot_first:
            here.check(*here.capture(here.cut(), []))
        here.run(before)
        epoch = here.cut()
        here.run(after)
        if not _succeeds(here):
            return
        here.run(later)
        record, report = here.capture(epoch, meanwhile)
        here.check(record, report)
        here.run(later)
        here.check(*here.capture(here.cut(), meanwhile))


@settings(deadline=None)
@given(operations(6, 24), operations(0, 20), operations(0, 20), operations(0, 20), operations(5, 30))
def test_epochs_that_wait_together_outlive_their_worker(
    first: list[Operation],
    between: list[Operation],
    after: list[Operation],
    later: list[Operation],
    meanwhile: list[Operation],
) -> None:
    """Two sealed epochs, two deaths, and a third epoch that the successor seals: each is exact."""
    with bench() as here:
        here.run(first)
        one = here.cut()
        here.run(between)
        two = here.cut()
        here.run(after)
        if not (_succeeds(here) and _succeeds(here)):
            return
        here.run(later)
        three = here.cut()
        here.run(after)
        for epoch in (one, two, three):
            here.check(*here.capture(epoch, meanwhile))


@settings(deadline=None)
@given(operations(6, 24), operations(0, 20), operations(0, 20), operations(5, 30))
def test_an_inherited_epoch_that_is_given_up_is_in_the_next_snapshot(
    first: list[Operation], between: list[Operation], later: list[Operation], meanwhile: list[Operation]
) -> None:
    """Folding it loses nothing: the next one compares everything."""
    with bench() as here:
        here.check(*here.capture(here.cut(), []))
        here.run(first)
        one = here.cut()
        here.run(between)
        two = here.cut()
        if not _succeeds(here):
            return
        here.run(later)
        here.core.abort(one)
        here.check(*here.capture(two, meanwhile))
        here.check(*here.capture(here.cut(), meanwhile))


@settings(deadline=None)
@given(operations(6, 24), operations(4, 24), operations(0, 24), operations(5, 30), st.integers(0, 60))
def test_a_record_that_was_cut_short_is_nothing(
    before: list[Operation],
    after: list[Operation],
    later: list[Operation],
    meanwhile: list[Operation],
    torn: int,
) -> None:
    """The worker dies while it writes a record; the change that the record was for has not happened."""
    with bench() as here:
        here.run(before)
        epoch = here.cut()
        here.run(after)
        extra = undo_format.encode(
            undo_format.NameRecord(1, epoch, b"name that is long enough to be cut" * 2, 0)
        )
        try:
            log = os.open("log", os.O_WRONLY | os.O_APPEND, dir_fd=here.core.undo_fd)
        except FileNotFoundError:
            return
        os.write(log, extra[: 1 + torn])
        os.close(log)
        if not _succeeds(here):
            return
        here.run(later)
        here.check(*here.capture(epoch, meanwhile))


@settings(deadline=None)
@given(
    operations(6, 24),
    operations(0, 12),
    operations(1, 6),
    st.integers(1, 24),
    operations(0, 24),
    operations(5, 30),
)
def test_a_worker_that_dies_within_an_operation_leaves_the_epoch_whole(
    before: list[Operation],
    after: list[Operation],
    last: list[Operation],
    step: int,
    later: list[Operation],
    meanwhile: list[Operation],
) -> None:
    """At any call of any operation: what was saved came before what was changed."""
    with bench() as here:
        here.run(before)
        epoch = here.cut()
        here.run(after)
        event("within an operation" if any(_killed_at(here, one, step) for one in last) else "between")
        if not _succeeds(here):
            return
        here.run(later)
        record, report = here.capture(epoch, meanwhile)
        here.check(record, report)
