"""One life of saved overlay state (undo log, sealed files, saved tracking), stopped at any of its durable calls.

A seeded scenario: a snapshot, two epochs that wait together while the job goes on, a clean stop, a new start. Checked are: the job saw
what it sees without the fault, what capture still gets of the epochs is exact, and the next snapshots are exact.
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
from ciuic.fuse_layer import epochs, hidden_links, swaps, undo, undo_format
from ciuic.fuse_layer.undo_format import UndoLost

SAVING = (undo, hidden_links, epochs, undo_format)
"""The modules that write saved overlay state."""
STATE_NAME = STATE_DIR_NAME.decode()
_SAVED = "tracking"


class Life(NamedTuple):
    """What became of one life."""

    calls: int
    """Durable calls that were made."""
    outcomes: tuple[int, ...]
    """What each operation of the job got: 0 or an errno."""
    tree: dict[str, tuple[int, int, bytes]]
    """What the job's files were after them."""
    exact: int
    """Waiting epochs that capture found whole, out of two."""
    killed: bool


def life(seed: int, faulty: FaultyOs) -> Life:
    """Runs the scenario of ``seed``. AssertionError where a promise is broken; an error in the job is in ``outcomes``."""
    choose = random.Random(seed)
    with bench() as here:
        here.run(_some(choose, 20))
        here.snapshot()
        here.run(_some(choose, 20))
        job = _Job(here.driver)
        killed, exact = False, 0
        with faults_in(SAVING, faulty):
            try:
                waiting = [here.cut()]
                job.run(_some(choose, 25))
                waiting.append(here.cut())
                job.run(_some(choose, 25))
            except Killed:
                killed = True
        tree = _tree(here.backing)
        if not killed:
            try:
                exact = _settle(here, waiting, faulty, choose)
                here.run(_some(choose, 10))
                _stop_cleanly(here, faulty)
            except Killed:
                killed = True
        if killed:
            faulty.after_power_cut(state_of(here.backing), choose)
        _start_again(here, choose)
        return Life(faulty.calls, tuple(job.outcomes), tree, exact, killed)


def _settle(here: Bench, waiting: list[int], faulty: FaultyOs, choose: random.Random) -> int:
    """Captures what waits (or gives the older up, by chance), then checks that nothing is kept for it any more."""
    exact = 0
    if choose.random() < 0.3:
        with faults_in(SAVING, faulty):
            here.core.abort(waiting.pop(0))
    for epoch in waiting:
        exact += _captured(here, epoch)
        here.core.abort(epoch)  # as the daemon does after a failed capture; nothing where it was committed
    here.run(_some(choose, 10))
    here.snapshot()
    assert here.core.status()["pending"] == []
    if not faulty.stop_at:
        kept = [path.name for path in (state_of(here.backing) / "undo").rglob("*") if path.is_file()]
        assert kept == []
    return exact


def _captured(here: Bench, epoch: int) -> bool:
    """Whether the epoch's capture was done, and then it was exact; else it was told so."""
    if not (state_of(here.backing) / "undo" / undo_format.sealed_name(epoch)).exists():
        return False
    try:
        record, report = here.capture(epoch)
    except UndoLost:
        return False
    here.check(record, report)
    return True


def _stop_cleanly(here: Bench, faulty: FaultyOs) -> None:
    """Saves the tracking as a clean stop does. Where it fails the worker says so; tracking is not trusted across a stop."""
    here.driver.close_all()
    with faults_in(SAVING, faulty), suppress(OSError):
        here.core.save_tracking()


def _start_again(here: Bench, choose: random.Random) -> None:
    """New workers over what is there: the state is emptied, the tracking used once, the next snapshots exact."""
    for number in range(2):
        here.start_again(f"{number + 6}" * 32)
        assert not (state_of(here.backing) / _SAVED).exists(), "tracking can be used twice"
        undo_dir = state_of(here.backing) / "undo"
        assert [path.name for path in undo_dir.rglob("*") if not path.is_dir()] == []
        for mode in ("full", "tracked"):
            here.run(_some(choose, 10))
            record, _ = here.snapshot()
            assert record.mode == mode


class _Job:
    """Runs operations and notes what each one got."""

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


def _some(choose: random.Random, count: int) -> list[Operation]:
    return [
        (choose.choice(KINDS), choose.randrange(PATHS), choose.randrange(PATHS), choose.randrange(8))
        for _ in range(count)
    ]


def _tree(top: Path) -> dict[str, tuple[int, int, bytes]]:
    """Type and mode, owner, and content of everything the job can see."""
    found = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if name.split("/")[0] != STATE_NAME:
            facts = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
            found[name] = (facts.st_mode, facts.st_uid, content)
    return found


def survive(seed: int, **fault: int | bool | None) -> tuple[int, int]:
    """Every durable call of the scenario of ``seed`` fails in turn; (fault points survived, epochs still exact).

    AssertionError, naming the call, where the job or a snapshot was hurt.
    """
    limit, swaps.COPY_LIMIT_BYTES = swaps.COPY_LIMIT_BYTES, BLOCK
    try:
        whole = life(seed, FaultyOs())
        assert whole.exact > 0
        exact = 0
        for stop_at in range(1, whole.calls + 1):
            exact += _survives(seed, whole, FaultyOs(stop_at, **fault))  # type: ignore[arg-type]
        return whole.calls, exact
    finally:
        swaps.COPY_LIMIT_BYTES = limit


def _survives(seed: int, whole: Life, faulty: FaultyOs) -> int:
    where = f"seed {seed}, call {faulty.stop_at}, error {faulty.error}, stay {faulty.stay}"
    try:
        after = life(seed, faulty)
    except BaseException as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    count = len(after.outcomes)
    assert after.outcomes == whole.outcomes[:count], f"{where}: the job saw the fault"
    if not after.killed:
        assert count == len(whole.outcomes)
        assert after.tree == whole.tree, f"{where}: the job's files differ"
    return after.exact
