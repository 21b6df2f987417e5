"""Tests that a successor captures exactly what a killed worker had sealed, whatever both changed since."""

from __future__ import annotations

import os
from contextlib import ExitStack
from unittest import mock

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.capture_bench import Bench, bench
from support.capture_bench import small_limits as small_limits
from support.core_driver import Operation, operations
from support.dying_os import DATA_CALLS, NAME_CALLS, DyingOs, Killed, Steps

from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.core import directories, files, names, overlay_hooks
from ciuic.fuse_layer.state import node_table, overlay_state, passthrough_state
from ciuic.fuse_layer.system import path_handles, syscalls
from ciuic.fuse_layer.tracking import hidden_links, undo_log

pytestmark = pytest.mark.keeps_descriptors("a worker that dies within a call closes nothing")

MODULES = (
    files,
    files,
    directories,
    files,
    names,
    hidden_links,
    names,
    names,
    node_table,
    overlay_hooks,
    overlay_hooks,
    overlay_state,
    passthrough_state,
    files,
    syscalls,
    undo_log,
    undo_log,
    path_handles,
)


def _killed_at(rig: Bench, operation: Operation, step: int) -> bool:
    """Run the operation and return whether the worker died within it."""
    dying = DyingOs(Steps(step), NAME_CALLS | DATA_CALLS)
    with ExitStack() as patched:
        for module in MODULES:
            patched.enter_context(mock.patch.object(module, "os", dying))
        try:
            rig.driver.do(operation)
        except Killed:
            return True
    return False


def _succeeds(rig: Bench) -> bool:
    taken_up = rig.succeed()
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
    """A sealed epoch is stored as the root at its cut after the worker died and its successor went on."""
    with bench() as rig:
        if snapshot_first:
            rig.check(*rig.capture(rig.cut(), []))
        rig.run(before)
        epoch = rig.cut()
        rig.run(after)
        if not _succeeds(rig):
            return
        rig.run(later)
        record, report = rig.capture(epoch, meanwhile)
        rig.check(record, report)
        rig.run(later)
        rig.check(*rig.capture(rig.cut(), meanwhile))


@settings(deadline=None)
@given(operations(6, 24), operations(0, 20), operations(0, 20), operations(0, 20), operations(5, 30))
def test_waiting_epochs_outlive_their_worker(
    first: list[Operation],
    between: list[Operation],
    after: list[Operation],
    later: list[Operation],
    meanwhile: list[Operation],
) -> None:
    """Two sealed epochs, two dead workers and a third epoch of the successor are each captured exactly."""
    with bench() as rig:
        rig.run(first)
        one = rig.cut()
        rig.run(between)
        two = rig.cut()
        rig.run(after)
        if not (_succeeds(rig) and _succeeds(rig)):
            return
        rig.run(later)
        three = rig.cut()
        rig.run(after)
        for epoch in (one, two, three):
            rig.check(*rig.capture(epoch, meanwhile))


@settings(deadline=None)
@given(operations(6, 24), operations(0, 20), operations(0, 20), operations(5, 30))
def test_an_inherited_epoch_that_is_given_up_is_in_the_next_snapshot(
    first: list[Operation], between: list[Operation], later: list[Operation], meanwhile: list[Operation]
) -> None:
    """An inherited epoch that is given up is folded without loss; the next capture compares everything."""
    with bench() as rig:
        rig.check(*rig.capture(rig.cut(), []))
        rig.run(first)
        one = rig.cut()
        rig.run(between)
        two = rig.cut()
        if not _succeeds(rig):
            return
        rig.run(later)
        rig.core.abort(one)
        rig.check(*rig.capture(two, meanwhile))
        rig.check(*rig.capture(rig.cut(), meanwhile))


@settings(deadline=None)
@given(operations(6, 24), operations(4, 24), operations(0, 24), operations(5, 30), st.integers(0, 60))
def test_a_record_that_was_cut_short_is_nothing(
    before: list[Operation],
    after: list[Operation],
    later: list[Operation],
    meanwhile: list[Operation],
    torn: int,
) -> None:
    """A record cut short by the worker's death is ignored, and the change it was for has not happened."""
    with bench() as rig:
        rig.run(before)
        epoch = rig.cut()
        rig.run(after)
        extra = undo_format.encode(
            undo_format.NameRecord(1, epoch, b"name that is long enough to be cut" * 2, 0)
        )
        try:
            log = os.open("log", os.O_WRONLY | os.O_APPEND, dir_fd=rig.core.undo_fd)
        except FileNotFoundError:
            return
        os.write(log, extra[: 1 + torn])
        os.close(log)
        if not _succeeds(rig):
            return
        rig.run(later)
        rig.check(*rig.capture(epoch, meanwhile))


@settings(deadline=None)
@given(
    operations(6, 24),
    operations(0, 12),
    operations(1, 6),
    st.integers(1, 24),
    operations(0, 24),
    operations(5, 30),
)
def test_a_worker_killed_within_an_operation_has_saved_the_old_state(
    before: list[Operation],
    after: list[Operation],
    last: list[Operation],
    step: int,
    later: list[Operation],
    meanwhile: list[Operation],
) -> None:
    """A worker that dies at any call of any operation has saved the old state before it changed anything."""
    with bench() as rig:
        rig.run(before)
        epoch = rig.cut()
        rig.run(after)
        event("within an operation" if any(_killed_at(rig, one, step) for one in last) else "between")
        if not _succeeds(rig):
            return
        rig.run(later)
        record, report = rig.capture(epoch, meanwhile)
        rig.check(record, report)
