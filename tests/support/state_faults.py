"""Life of saved overlay state (undo log, sealed files, saved tracking), stopped at any of its durable calls.

A seeded scenario: a snapshot, two epochs that wait together while the job goes on, a clean stop, a new start.
Checked are: the job's results equal those without the fault, every epoch still captured is exact, and the
next snapshots are exact.
"""

from __future__ import annotations

import random
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from support.capture_bench import BLOCK, Bench, bench
from support.core_driver import KINDS, PATHS, CoreDriver, Operation, path_of
from support.faulty_os import FaultyOs, Killed, faults_in
from support.state_dir import state_of

from ciuic import STATE_DIR_NAME
from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.core import epochs, files
from ciuic.fuse_layer.tracking import hidden_links, undo_log
from ciuic.fuse_layer.undo_format import UndoLost

SAVING = (undo_log, undo_log, hidden_links, epochs, undo_format)
"""Modules that write saved overlay state."""
STATE_NAME = STATE_DIR_NAME.decode()
_SAVED = "tracking"


class Life(NamedTuple):
    """Results of one life."""

    calls: int
    """Number of durable calls made."""
    outcomes: tuple[int, ...]
    """Result of each operation of the job: 0 or an errno."""
    tree: dict[str, tuple[int, int, bytes]]
    """The job's files after its operations."""
    exact: int
    """Number of pending epochs that capture found whole, out of two."""
    killed: bool


def life(seed: int, faulty: FaultyOs) -> Life:
    """Run the scenario of ``seed``; raise AssertionError for a broken promise.

    An error in the job is in ``outcomes``.
    """
    choose = random.Random(seed)
    with bench() as rig:
        rig.run(_random_operations(choose, 20))
        rig.snapshot()
        rig.run(_random_operations(choose, 20))
        job = _Job(rig.driver)
        killed, exact = False, 0
        with faults_in(SAVING, faulty):
            try:
                waiting = [rig.cut()]
                job.run(_random_operations(choose, 25))
                waiting.append(rig.cut())
                job.run(_random_operations(choose, 25))
            except Killed:
                killed = True
        tree = _tree(rig.backing)
        if not killed:
            try:
                exact = _settle(rig, waiting, faulty, choose)
                rig.run(_random_operations(choose, 10))
                _stop_cleanly(rig, faulty)
            except Killed:
                killed = True
        if killed:
            faulty.after_power_cut(state_of(rig.backing), choose)
        _start_again(rig, choose)
        return Life(faulty.calls, tuple(job.outcomes), tree, exact, killed)


def _settle(rig: Bench, waiting: list[int], faulty: FaultyOs, choose: random.Random) -> int:
    """Capture pending epochs (or abandon the older, by chance), then check that none is kept."""
    exact = 0
    if choose.random() < 0.3:
        with faults_in(SAVING, faulty):
            rig.core.abort(waiting.pop(0))
    for epoch in waiting:
        exact += _captured(rig, epoch)
        # The daemon aborts so after a failed capture; a committed epoch is not affected.
        rig.core.abort(epoch)
    rig.run(_random_operations(choose, 10))
    rig.snapshot()
    assert rig.core.status()["pending"] == []
    if not faulty.stop_at:
        kept = [path.name for path in (state_of(rig.backing) / "undo").rglob("*") if path.is_file()]
        assert kept == []
    return exact


def _captured(rig: Bench, epoch: int) -> bool:
    """Return whether the epoch was captured, and then exactly; else capture reported it as lost."""
    if not (state_of(rig.backing) / "undo" / undo_format.sealed_name(epoch)).exists():
        return False
    try:
        record, report = rig.capture(epoch)
    except UndoLost:
        return False
    rig.check(record, report)
    return True


def _stop_cleanly(rig: Bench, faulty: FaultyOs) -> None:
    """Save the tracking as a clean stop does.

    If that fails the worker reports it, and tracking is not trusted later.
    """
    rig.driver.close_all()
    with faults_in(SAVING, faulty), suppress(OSError):
        rig.core.save_tracking()


def _start_again(rig: Bench, choose: random.Random) -> None:
    """Start new workers on the same files, use the tracking once, and check the next snapshots."""
    for number in range(2):
        rig.start_again(f"{number + 6}" * 32)
        assert not (state_of(rig.backing) / _SAVED).exists(), "tracking can be used twice"
        undo_dir = state_of(rig.backing) / "undo"
        assert [path.name for path in undo_dir.rglob("*") if not path.is_dir()] == []
        for mode in ("full", "tracked"):
            rig.run(_random_operations(choose, 10))
            record, _ = rig.snapshot()
            assert record.mode == mode


class _Job:
    """Run operations and record the result of each."""

    def __init__(self, driver: CoreDriver) -> None:
        self._driver = driver
        self.outcomes: list[int] = []

    def run(self, ops: list[Operation]) -> None:
        for kind, one, other, how in ops:
            try:
                self._driver._kinds[kind](path_of(one), path_of(other), how)
                self.outcomes.append(0)
            except OSError as error:
                self.outcomes.append(error.errno or -1)


def _random_operations(choose: random.Random, count: int) -> list[Operation]:
    return [
        (choose.choice(KINDS), choose.randrange(PATHS), choose.randrange(PATHS), choose.randrange(8))
        for _ in range(count)
    ]


def _tree(top: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return type and mode, owner, and content of everything the job can see."""
    found = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if name.split("/")[0] != STATE_NAME:
            facts = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
            found[name] = (facts.st_mode, facts.st_uid, content)
    return found


def survive(seed: int, **fault: int | bool | None) -> tuple[int, int]:
    """Let every durable call of the scenario fail in turn; return (survived, epochs still exact).

    Raises AssertionError, naming the call, if the job or a snapshot was damaged.
    """
    limit = files.COPY_LIMIT_BYTES
    files.COPY_LIMIT_BYTES = BLOCK  # type: ignore[misc]
    try:
        undisturbed = life(seed, FaultyOs())
        assert undisturbed.exact > 0
        exact = 0
        for stop_at in range(1, undisturbed.calls + 1):
            exact += _survives(seed, undisturbed, FaultyOs(stop_at, **fault))  # type: ignore[arg-type]
        return undisturbed.calls, exact
    finally:
        files.COPY_LIMIT_BYTES = limit  # type: ignore[misc]


def _survives(seed: int, undisturbed: Life, faulty: FaultyOs) -> int:
    where = f"seed {seed}, call {faulty.stop_at}, error {faulty.error}, stay {faulty.stay}"
    try:
        after = life(seed, faulty)
    except BaseException as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    count = len(after.outcomes)
    assert after.outcomes == undisturbed.outcomes[:count], f"{where}: the job saw the fault"
    if not after.killed:
        assert count == len(undisturbed.outcomes)
        assert after.tree == undisturbed.tree, f"{where}: the job's files differ"
    return after.exact
