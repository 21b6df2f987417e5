"""Fault injection into modules that save overlay state, at the nth durable call.

Replaces a module's ``os`` (``faults_in``), so that the job's own requests to the file system are not
affected. It also computes what a power cut would leave of the state directory: what was synced, and by chance
some of what was not.

A seeded scenario of saved overlay state (undo log, sealed files, saved tracking) is stopped at any of its durable calls: a snapshot, two epochs that wait together while the job goes on, a clean stop, a new start.
Checked are: the job's results equal those without the fault, every epoch still captured is exact, and the
next snapshots are exact.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from support.capture_bench import BLOCK, Bench, bench
from support.core_driver import KINDS, PATHS, CoreDriver, Operation, path_of
from support.overlay import state_of

from ciuic import STATE_DIR_NAME
from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.core import overlay_core, overlay_hooks
from ciuic.fuse_layer.tracking import hidden_links, undo_log
from ciuic.fuse_layer.undo_format import UndoLost


class Killed(BaseException):
    """Death of the process. Not an Exception: nothing handles it."""


class FaultyOs:
    """Counter of durable calls; the one numbered ``stop_at`` (from 1) fails, half done if it is a write.

    ``error``: an errno, or None for `Killed`. With ``stay`` every later call that needs space fails too.
    """

    def __init__(self, stop_at: int = 0, error: int | None = None, *, stay: bool = False) -> None:
        self.stop_at, self.error, self.stay = stop_at, error, stay
        self.calls = 0
        self.synced: dict[int, bytes] = {}
        """Inode → the content that is durable."""
        self.synced_names: dict[int, dict[str, int]] = {}
        """Directory inode → its durable names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _fails(self, *, needs_space: bool) -> bool:
        self.calls += 1
        later = 0 < self.stop_at < self.calls and (self.error is None or (self.stay and needs_space))
        return self.calls == self.stop_at or later

    def _raise(self) -> None:
        if self.error is None:
            raise Killed
        raise OSError(self.error, os.strerror(self.error))

    def _step(self, *, needs_space: bool) -> None:
        if self._fails(needs_space=needs_space):
            self._raise()

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            self._step(needs_space=True)
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def write(self, fd: int, data: Any) -> int:
        if self._fails(needs_space=True):
            os.write(fd, bytes(data)[: len(data) // 2])
            self._raise()
        return os.write(fd, data)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if self._fails(needs_space=True):
            os.pwrite(fd, bytes(data)[: len(data) // 2], offset)
            self._raise()
        return os.pwrite(fd, data, offset)

    def fdopen(self, fd: int, mode: str) -> Any:
        return _File(self, fd) if "w" in mode else os.fdopen(fd, mode)

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        self._step(needs_space=True)
        os.ftruncate(fd, size_bytes)

    def fsync(self, fd: int) -> None:
        self._step(needs_space=True)
        ino = os.fstat(fd).st_ino
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            self.synced_names[ino] = {name: _ino(f"/proc/self/fd/{fd}/{name}") for name in os.listdir(fd)}
        else:
            self.synced[ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._step(needs_space=True)
        os.mkdir(path, mode, dir_fd=dir_fd)

    def link(self, source: Any, target: Any, **options: Any) -> None:
        self._step(needs_space=True)
        os.link(source, target, **options)

    def rename(self, source: Any, target: Any, **options: Any) -> None:
        self._step(needs_space=True)
        os.rename(source, target, **options)

    def unlink(self, path: Any, **options: Any) -> None:
        self._step(needs_space=False)
        os.unlink(path, **options)

    def after_power_cut(self, state: Path, choice: random.Random) -> None:
        """Reduce the state directory to what the disk may hold after a power cut."""
        durable = self.synced_names.get(_ino(str(state)), {})
        here = {path.name: path.stat().st_ino for path in state.iterdir() if path.is_file()}
        for name, ino in here.items():
            lost = durable.get(name) != ino and choice.random() < 0.5
            _spoil(state / name, self.synced.get(ino), lost, choice)
        # Files in this directory are never synced.
        for path in sorted(state.glob("undo/**/*"), reverse=True):
            if path.is_file() and not path.is_symlink():
                # Another name of the job's own file: only the name can be lost.
                if path.parent.name == "hold":
                    path.unlink() if choice.random() < 0.5 else None
                else:
                    _spoil(path, None, choice.random() < 0.5, choice)


class _File:
    """A file being written through `FaultyOs`, unbuffered."""

    def __init__(self, owner: FaultyOs, fd: int) -> None:
        self._owner, self._fd = owner, fd

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def write(self, data: bytes) -> int:
        return self._owner.write(self._fd, data)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def fileno(self) -> int:
        return self._fd


def _ino(path: str) -> int:
    return os.lstat(path).st_ino


def _spoil(path: Path, durable: bytes | None, lost: bool, choice: random.Random) -> None:
    if lost:
        path.unlink()
    elif durable is None:
        content = path.read_bytes()
        kind, cut = choice.randrange(4), choice.randrange(len(content) + 1)
        if kind:
            path.write_bytes((b"", content[:cut], content[:cut] + bytes(len(content) - cut))[kind - 1])


@contextmanager
def faults_in(modules: Sequence[ModuleType], faulty: FaultyOs) -> Iterator[FaultyOs]:
    """Replace the modules' ``os`` by ``faulty`` for the block."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "os", faulty))
        yield faulty


NO_SPACE, IO_ERROR = errno.ENOSPC, errno.EIO


SAVING = (undo_log, undo_log, hidden_links, overlay_core, undo_format)
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
    limit = overlay_hooks.COPY_LIMIT_BYTES
    overlay_hooks.COPY_LIMIT_BYTES = BLOCK  # type: ignore[misc]
    try:
        undisturbed = life(seed, FaultyOs())
        assert undisturbed.exact > 0
        exact = 0
        for stop_at in range(1, undisturbed.calls + 1):
            exact += _survives(seed, undisturbed, FaultyOs(stop_at, **fault))  # type: ignore[arg-type]
        return undisturbed.calls, exact
    finally:
        overlay_hooks.COPY_LIMIT_BYTES = limit  # type: ignore[misc]


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
