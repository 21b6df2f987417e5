"""Trainers of the configuration ([[trainer]]), found by a pid file, a heartbeat file, or both.

Guarantees: a pid file that is older than the process with that pid is ignored; a heartbeat file counts from
the moment in which it was first seen to change, so that one left behind by an earlier run is no incident. A
file that cannot be read, because its disk hangs, delays no other trainer.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import structlog
import trio

from ciuic.config import TrainerConfig
from ciuic.daemon.trainers.registry import TrainerRegistry
from ciuic.daemon.trainers.trainer import ProcessIdentity, WatchedTrainer
from ciuic.errors import Busy
from ciuic.protocol.watch_client import Hello
from ciuic.system import processes

LOOK_SECONDS: Final = 1.0
# Tolerance of the comparison that a pid file is written after its process began: the two times come from
# different clocks.
_LATE_SECONDS: Final = 5.0
log = structlog.get_logger(__name__)


class Found(NamedTuple):
    """Content of the files of one trainer."""

    pid: int = 0
    """Process id; 0: none, or of no live process."""
    beat_ns: int = 0
    """Modification time of the heartbeat file; 0: there is none."""


class TrainerFiles:
    """Registers configured trainers. `run` is its task."""

    def __init__(self, trainers: TrainerRegistry, wanted: Callable[[], Iterable[TrainerConfig]]) -> None:
        self._trainers = trainers
        self._wanted = wanted
        self._watched: dict[TrainerConfig, WatchedTrainer] = {}
        self._looking: set[TrainerConfig] = set()
        # A limiter of its own: a look at a file on a disk that hangs keeps its thread.
        self._threads = trio.CapacityLimiter(64)

    async def run(self) -> None:
        """Look at all files once a second, until cancelled. Changes of the configuration take effect."""
        async with trio.open_nursery() as nursery:
            while True:
                wanted = list(self._wanted())
                for gone in [one for one in self._watched if one not in wanted]:
                    self._trainers.drop(self._watched.pop(gone))
                for one in wanted:
                    if one not in self._looking:
                        self._looking.add(one)
                        nursery.start_soon(self._look_at, one)
                await trio.sleep(LOOK_SECONDS)

    async def _look_at(self, wanted: TrainerConfig) -> None:
        try:
            found = await trio.to_thread.run_sync(
                look_at, wanted, abandon_on_cancel=True, limiter=self._threads
            )
            self._follow(wanted, found)
        except Exception:
            log.exception("trainer_files_failed", trainer=wanted.name)
        finally:
            self._looking.discard(wanted)

    def _follow(self, wanted: TrainerConfig, found: Found) -> None:
        known = self._watched.get(wanted)
        if known is not None and self._trainers.find(known.identity) is not known:
            known = None  # it has ended, and that was reported
        if known is None or (found.pid and known.identity.pid != found.pid):
            if known is not None and known.life < 0:
                self._trainers.drop(known)
            known = self._begin(wanted, found)
        if known is not None:
            known.file_beats = found.beat_ns
            known.present = bool(found.pid) or wanted.pid_file is None

    def _begin(self, wanted: TrainerConfig, found: Found) -> WatchedTrainer | None:
        life, ticks = -1, 0
        if found.pid:
            try:
                life, ticks = processes.life_of(found.pid), processes.start_ticks(found.pid)
            except OSError:
                return None
        where = str(wanted.pid_file or wanted.heartbeat_file)
        # A trainer without a process gets an identity that no process has and that is unique.
        identity = (
            ProcessIdentity(max(0, processes.owner(found.pid)), found.pid, ticks)
            if found.pid
            else ProcessIdentity(0, 0, hash(wanted.name))
        )
        hello = Hello(
            name=wanted.name,
            where=where,
            kind="file",
            pid=found.pid,
            start_ticks=ticks,
            heartbeat_seconds=float(wanted.heartbeat_seconds),
        )
        here = bool(found.pid) or wanted.pid_file is None
        try:
            trainer = self._trainers.add(identity, life, [], hello, clears=here)
        except Busy as error:
            log.warning("trainer_refused", trainer=wanted.name, reason=str(error))
            if life >= 0:
                os.close(life)
            return None
        self._watched[wanted] = trainer
        trainer.pid_file = wanted.pid_file
        return trainer


def look_at(wanted: TrainerConfig) -> Found:
    """Read the files of one trainer. Blocks as long as the disk does."""
    return Found(
        0 if wanted.pid_file is None else _pid_in(wanted.pid_file),
        0 if wanted.heartbeat_file is None else _time_of(wanted.heartbeat_file),
    )


def _pid_in(path: Path) -> int:
    try:
        # O_NONBLOCK: a fifo in place of the file must not block the thread.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            text = file.read(32)
            written_seconds_ago = time.time() - os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno != errno.ENOENT:
            log.warning("pid_file_not_read", path=str(path), error=str(error))
        return 0
    words = text.split()
    # 1 is the init process, and no pid reaches 4,194,304 (proc_sys_kernel(5), pid_max).
    if not words or not words[0].isdigit() or not 1 < int(words[0]) < 1 << 22:
        return 0
    pid = int(words[0])
    age_seconds = processes.seconds_old(pid)
    if not processes.start_ticks(pid) or age_seconds < written_seconds_ago - _LATE_SECONDS:
        return 0  # another process has the pid by now
    return pid


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
