"""Tests that a root whose state directory another program deletes goes on: exact snapshots, no error for the job."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.capture_bench import Bench, bench
from support.core_driver import Operation, operations
from support.overlay import state_of

from ciuic import STATE_DIR_NAME


def _delete(rig: Bench, what: str) -> None:
    state = state_of(rig.backing)
    place = {
        "container": rig.backing.parent / os.fsdecode(STATE_DIR_NAME),
        "state": state,
        "undo": state / "undo",
        "hold": state / "undo" / "hold",
    }[what]
    shutil.rmtree(place)


@settings(deadline=None)
@given(
    before=operations(0, 14),
    pending=st.booleans(),
    between=operations(0, 14),
    what=st.sampled_from(["container", "state", "undo", "hold"]),
    after=operations(0, 14),
    meanwhile=operations(0, 14),
)
def test_snapshots_are_exact_after_the_state_was_deleted(
    before: list[Operation],
    pending: bool,
    between: list[Operation],
    what: str,
    after: list[Operation],
    meanwhile: list[Operation],
) -> None:
    """The next cut makes the state anew; a sealed epoch is given up, and its changes are in the next snapshot."""
    with bench() as rig:
        rig.run(before)
        rig.snapshot()
        if pending:
            rig.cut()
            event("an epoch was sealed")
        rig.run(between)
        _delete(rig, what)
        rig.run(after)
        rig.snapshot(meanwhile)
        assert rig.core.status()["renewed"] == 1
        rig.run(after)
        rig.snapshot(meanwhile)
        assert rig.core.status()["renewed"] == 1
        assert state_of(rig.backing).is_dir()


@pytest.mark.parametrize("asked", ["status", "cut"])
def test_state_is_made_anew_by_the_next_question(asked: str) -> None:
    """A look at the worker is enough to make the state anew, in the same place and for this user alone."""
    with bench() as rig:
        rig.snapshot()
        place = state_of(rig.backing)
        _delete(rig, "container")
        getattr(rig.core, asked)()
        assert state_of(rig.backing) == place
        assert place.stat().st_mode & 0o777 == 0o700
        assert {"undo"} <= set(os.listdir(place))
