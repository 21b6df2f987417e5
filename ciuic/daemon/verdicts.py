"""Verdicts on the checkpoints of new snapshots: judged by a process of its own, and stored beside the snapshots.

Guarantees: no cut, capture or upkeep waits for it: it starts after a commit, takes no lock of the repository, and its process is at
idle priority. A snapshot in which nothing has changed starts none. Snapshots that other programs have committed into the repository
(states of trainings) are found within a minute. What the process prints is decoded as if a stranger had written it. A snapshot on which
the process dies is not tried again in the life of the daemon: it is judged when somebody looks at it.

Age of the newest GOOD checkpoint of each root, from stored verdicts.

Guarantees: nothing is judged here, and a record that does not count is none, so that an age errs towards old. The age of a checkpoint that
is known is counted since boot, and one that is dated in the future counts from when it was first seen: setting the clock makes none younger.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
import trio

from ciuic.daemon.base.events import Wakeup
from ciuic.daemon.base.job_process import job_process
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.jobs import VerdictJob, job_command
from ciuic.daemon.snapshots.schedule import boot_ns
from ciuic.errors import CiuicError
from ciuic.repository import Repository, SnapshotInfo
from ciuic.structs import decode_json
from ciuic.system.processes import describe_exit
from ciuic.types import is_safety, order_of
from ciuic.verdicts.records import MAX_RECORD_BYTES, VerdictRecord, VerdictRecords, newest_of, own_key


class GoodCheckpoint(NamedTuple):
    """Newest GOOD checkpoint of a root."""

    path: bytes
    mtime_ns: int
    """Latest change of one of its files."""


class GoodCheckpoints:
    """Newest GOOD checkpoints. `look` blocks; any thread may ask for ages."""

    def __init__(self, now_ns: Callable[[], int], boot_ns: Callable[[], int] = boot_ns) -> None:
        """Prepare to look.

        Args:
            now_ns: wall clock.
            boot_ns: time since boot.
        """
        self._now_ns = now_ns
        self._boot_ns = boot_ns
        self._began_ns = boot_ns()
        # What each snapshot with verdicts has, by root: a record is read once, of the patterns in force.
        self._patterns: tuple[str, ...] = ()
        self._of_snapshots: dict[str, dict[bytes, GoodCheckpoint]] = {}
        # The newest, and the time since boot at its last change.
        self._newest: dict[str, tuple[GoodCheckpoint, int]] = {}
        self._lock = threading.Lock()

    def look(self, repository: Repository, records: VerdictRecords, roots: Collection[str]) -> None:
        """Find the newest GOOD checkpoint of each root."""
        if records.patterns != self._patterns:
            with self._lock:
                self._patterns, self._of_snapshots = records.patterns, {}
        infos = [
            info for info in repository.snapshots.newest_first() if not is_safety(info.tags, info.message)
        ]
        ids = {str(info.id) for info in infos}
        found: dict[str, GoodCheckpoint] = {}
        wanted = {os.fsencode(root): root for root in roots}
        for info in infos:
            for path in wanted.keys() & set(info.roots):
                root = wanted[path]
                # A snapshot shows nothing that was changed after its cut.
                if root in found and found[root].mtime_ns >= info.time_ns:
                    del wanted[path]
                    continue
                known = self._of_snapshot(repository, records, str(info.id)).get(path)
                if known is not None and (root not in found or known.mtime_ns > found[root].mtime_ns):
                    found[root] = known
            if not wanted:
                break
        with self._lock:
            self._of_snapshots = {id_: one for id_, one in self._of_snapshots.items() if id_ in ids}
            before, now_ns = self._newest, self._now_ns()
            self._newest = {
                root: before[root]
                if root in before and before[root][0] == one
                else (one, self._boot_ns() - max(0, now_ns - one.mtime_ns))
                for root, one in found.items()
            }

    def _of_snapshot(
        self, repository: Repository, records: VerdictRecords, id_: str
    ) -> dict[bytes, GoodCheckpoint]:
        known = self._of_snapshots.get(id_)
        if known is not None:
            return known
        try:
            record = records.record(repository.snapshots.load(repository.snapshots.resolve(id_)))
        except CiuicError:
            return {}
        # It may have verdicts by the next look.
        if record is None:
            return {}
        good: dict[bytes, GoodCheckpoint] = {}
        for root, dated in record.roots:
            newest = newest_of(one for one in dated if one.checkpoint.verdict.is_good)
            if newest is not None:
                good[root] = GoodCheckpoint(newest.checkpoint.path, newest.mtime_ns)
        with self._lock:
            self._of_snapshots[id_] = good
        return good

    def seconds(self, root: str) -> float | None:
        """Return the age of a root's newest GOOD checkpoint; None if none is known."""
        with self._lock:
            known = self._newest.get(root)
        return None if known is None else max(0.0, (self._boot_ns() - known[1]) / 1e9)

    def too_old(self, limits_seconds: Iterable[tuple[str, int]]) -> dict[str, bytes]:
        """Return the roots whose newest GOOD checkpoint is older than their limit, with its path.

        A root without one counts from the start of the daemon, and has an empty path.

        Args:
            limits_seconds: root and limit; 0: none.
        """
        found: dict[str, bytes] = {}
        for root, limit_seconds in limits_seconds:
            with self._lock:
                known = self._newest.get(root)
            since_ns = self._began_ns if known is None else known[1]
            if limit_seconds and self._boot_ns() - since_ns > limit_seconds * 10**9:
                found[root] = b"" if known is None else known[0].path
        return found


_PAUSE_SECONDS = 60.0
_MAX_SNAPSHOTS = 64
"""Snapshots of one process, whose processor time is limited."""
log = structlog.get_logger(__name__)


class Verdicts:
    """Judges snapshots as they come; `run` is its task. Belongs to the trio thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        wakeup: Wakeup,
        *,
        cwd: Path,
        command: Sequence[str] = (),
        good: GoodCheckpoints | None = None,
    ) -> None:
        """Prepare to start processes.

        Args:
            settings: settings in force.
            wakeup: set when a snapshot was committed.
            cwd: working directory of the processes.
            command: command of a process; empty: the module.
            good: is told of the verdicts.
        """
        self._good = good
        self._settings = settings
        self._wakeup = wakeup
        self._cwd = cwd
        self._command = list(command or job_command("verdicts"))
        self._settled: set[str] = set()
        """Snapshots that have verdicts, or on which a process died."""
        self._patterns: tuple[str, ...] = ()
        """Patterns of checkpoints by which they have them."""

    async def run(self) -> None:
        """Judge what is there and what comes, until cancelled."""
        while True:
            try:
                while await self.once():
                    pass
            except (CiuicError, OSError) as error:
                log.warning("verdicts_failed", error=str(error))
            except Exception:
                log.exception("verdicts_failed")  # a defect there must not end the service
            with trio.move_on_after(_PAUSE_SECONDS):
                await self._wakeup.wait()

    async def once(self) -> int:
        """Judge the newest snapshots that have no verdicts, and return how many there were."""
        settings = self._settings()
        if settings.repository is None:
            return 0
        if settings.checkpoint_patterns != self._patterns:
            self._settled.clear()
            self._patterns = settings.checkpoint_patterns
        records, pending, carried = await trio.to_thread.run_sync(self._pending, settings.repository)
        if not pending:
            return carried
        job = VerdictJob(
            repository=str(settings.repository),
            snapshots=tuple(pending),
            key=records.key,
            patterns=records.patterns,
            io_priority=settings.io_priority,
        )
        await self._judge(job, records)
        # What has no verdicts now has none after another try either.
        self._settled.update(pending)
        return carried + len(pending)

    def _pending(self, path: Path) -> tuple[VerdictRecords, list[str], int]:
        """Return the newest snapshots without verdicts, and how many have got them here; remove the verdicts on those that are gone."""
        with Repository.open(path) as repository:
            records = VerdictRecords(repository, own_key(), self._patterns)
            # Without a key: in a repository of another user no record counts.
            if not records.key:
                return records, [], 0
            records.remove_all_but(repository.snapshots.names())
            if self._good is not None:
                self._good.look(repository, records, [root.path for root in self._settings().roots])
            infos = repository.snapshots.list()
            ids = [str(info.id) for info in infos]
            self._settled.intersection_update(ids)
            self._settled.update(
                id_ for id_ in ids if id_ not in self._settled and records.summary(id_) is not None
            )
            pending = [id_ for id_ in ids if id_ not in self._settled][:_MAX_SNAPSHOTS]
            # Oldest first: each may have what the one before has.
            carried = {id_ for id_ in reversed(pending) if self._carry(repository, records, infos, id_)}
            return records, [id_ for id_ in pending if id_ not in carried], len(carried)

    def _carry(
        self, repository: Repository, records: VerdictRecords, infos: Sequence[SnapshotInfo], id_: str
    ) -> bool:
        """Store the verdicts on a snapshot in which nothing has changed, and return whether it is one. Starts no process."""
        by_id = {str(info.id): info for info in infos}
        info = by_id[id_]

        def before(path: bytes, time_ns: int) -> str:
            earlier = [
                one for one in infos if one.host == info.host and path in one.roots and one.time_ns < time_ns
            ]
            return str(max(earlier, key=lambda one: (one.time_ns, order_of(one))).id) if earlier else ""

        other_id = before(info.roots[0], info.time_ns) if info.roots else ""
        if other_id not in self._settled:
            return False
        try:
            snapshot, other = (repository.snapshots.load(by_id[one].id) for one in (id_, other_id))
        except CiuicError:  # a damaged one must not keep the others from having verdicts
            return False
        carried = records.carried(other, snapshot, before)
        if carried is None or not records.write(carried):
            return False
        self._settled.add(id_)
        return True

    async def _judge(self, job: VerdictJob, records: VerdictRecords) -> None:
        missing = set(job.snapshots)
        # It writes nothing but its output.
        async with job_process(self._command, job, self._cwd, at_once=True) as running:
            rest = b""
            try:
                async for piece in running.stdout:
                    *lines, rest = (rest + piece).split(b"\n")
                    if len(rest) > MAX_RECORD_BYTES:
                        raise CiuicError("the process that judges checkpoints printed no record")
                    for line in lines:
                        record = decode_json(line, VerdictRecord)
                        # A process that was taken over must not speak of other snapshots.
                        if record.snapshot in missing:
                            missing.remove(record.snapshot)
                            await trio.to_thread.run_sync(records.write, record)
            except msgspec.DecodeError as error:
                raise CiuicError(f"the process that judges checkpoints printed no record: {error}") from error
            status = await running.process.wait()
        log.info("checkpoints_judged", snapshots=len(job.snapshots) - len(missing))
        if status:
            log.warning("verdicts_failed", error=describe_exit(status), without=sorted(missing)[:5])
