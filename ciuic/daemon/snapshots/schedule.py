"""Snapshots that nobody asks for: those of the schedule, the first of each root, those owed or due by events; and the ages of the newest.

*Schedule and first snapshots.* APScheduler decides when a snapshot is due; its jobs only post to a bounded trio channel. Each tick takes one of
all roots that have none on its way. The first snapshot of a root is taken as soon as the root is protected:
everything in it is at risk until then.

Guarantees:

* Due times that were missed while the machine slept or the daemon was down are made up for by one snapshot in
  all. A tick is dropped while the one before is unanswered (the channel holds one), and answered by one snapshot
  at most. The scheduler's thread runs no code of ours that could fail or wait.
* A snapshot that cannot be cut is an alert and is tried again (`retry`). A root whose last scheduled snapshot is
  on its way keeps no other root from its turn.
* Every root that was reported by `FirstSnapshots.wanted` gets a snapshot when it is mounted, whatever the
  schedule says. Roots that were protected while no daemon ran are left to the schedule, whose first tick comes at
  once where a root has no snapshot.

*Owed snapshots* are the last ones of roots whose protection then ends (ciuic.config.owed_snapshots). A record goes only
when its snapshot is durable, or when its root is gone from the configuration or from the disk, which is said. Until
then it is tried again, and an alert says why it was not taken.

*Ages* go by a clock that cannot be set. A snapshot has the wall time of its cut. Once it is seen its age is counted in
time since boot (CLOCK_BOOTTIME), so that setting the clock makes no snapshot younger or older. Guarantees: a restart of
the daemon keeps the count, by a file in the runtime directory; an age goes on growing while the repository cannot be
read; a cut that lies in the future is no recent one, but counts as old as the boot. Leaves to the repository which
snapshot is the newest: it has the order of commits, whatever the clock said.

*Events* are a rename, a new name, the end of a writer, or enough changed bytes. The overlay workers count what happens
to the names of ``[[snapshot_when]]`` (fuse_layer/state/passthrough_state.py); this task takes the counts every second,
while there are rules. Guarantees: a burst gives one snapshot, cut when a rule's names have been quiet for two seconds,
at most half a minute after the first; rules that are due together share a snapshot; a rule cuts no sooner than
``least_between`` after its last one of a root and no more than ``per_hour`` times an hour of it, and what has happened
meanwhile is cut when it may again, by the daemon that follows where this one is killed. A worker that has died and was
replaced counts from the daemon's next look on.
"""

from __future__ import annotations

import os
import shlex
import stat
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final

import structlog
import trio
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from ciuic.config import SnapshotWhen
from ciuic.config.owed_snapshots import OwedSnapshot, owed_snapshots, settle_snapshot
from ciuic.daemon.base.events import Alerts, EventBus, Wakeup, repeat
from ciuic.daemon.base.repository_store import LastSnapshot, Store
from ciuic.daemon.base.runtime import AgeRecord, AgeRecords, EventRecord, RuntimeDirectory
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import SnapshotRequest
from ciuic.protocol.worker_frames import NameCounts, WatchedNames
from ciuic.system.processes import boot_id
from ciuic.types import TAG_SAFETY
from ciuic.units import plural

TAG_EVENT: Final = "event"
"""Tag of these snapshots."""
PERIOD_SECONDS: Final = 1.0
QUIET_SECONDS: Final = 2.0
MAX_WAIT_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 30.0
_HOUR_SECONDS: Final = 3600.0
log = structlog.get_logger(__name__)


class _RuleState:
    """State of one rule: events since the last cut of each root, and the times of its cuts."""

    def __init__(self, rule: SnapshotWhen) -> None:
        self.rule = rule
        self._pending: dict[str, tuple[float, float]] = {}
        """Roots in which it happened since their last cut; times of the first and the last event."""
        self._hurries: set[str] = set()
        # By root, so that events in one user's root do not use up the limits of another's.
        self._cuts: defaultdict[str, deque[float]] = defaultdict(deque)

    def happened(self, root: str, now: float) -> None:
        """Note an event."""
        self._pending[root] = self._pending.get(root, (now, now))[0], now

    def record(self) -> EventRecord:
        """Return what a successor must know."""
        cuts = {root: list(times) for root, times in self._cuts.items() if times}
        return EventRecord(roots=sorted(self._pending), cuts_by_root=cuts)

    def take_over(self, record: EventRecord, now: float) -> None:
        """Go on from what a predecessor knew; its events count from now on as if they had just happened."""
        for root in record.roots:
            self.happened(root, now)
        for root, times in record.cuts_by_root.items():
            self._cuts[root].extend(cut for cut in times if cut <= now)

    def hurry(self, root: str) -> None:
        """Wait for no quiet: files are being removed, and those that are still there are not in any cut."""
        if root in self._pending:
            self._hurries.add(root)

    def due(self, now: float, roots: Iterable[str]) -> set[str]:
        """Return those of the roots of which a snapshot is to be cut now."""
        found = {root for root in roots if root in self._pending and self._may_cut(root, now)}
        if not found or self.rule.name is None or self._hurries & found:
            return found
        first = min(self._pending[root][0] for root in found)
        last = max(self._pending[root][1] for root in found)
        return set() if now - last < QUIET_SECONDS and now - first < MAX_WAIT_SECONDS else found

    def _may_cut(self, root: str, now: float) -> bool:
        cuts = self._cuts[root]
        while cuts and now - cuts[0] >= _HOUR_SECONDS:
            cuts.popleft()
        return len(cuts) < self.rule.per_hour and not (
            cuts and now - cuts[-1] < self.rule.least_between_seconds
        )

    def cut(self, roots: Iterable[str], now: float) -> None:
        """Note a cut of these roots, which has all that has happened in them."""
        for root in roots:
            self._hurries.discard(root)
            if self._pending.pop(root, None):
                self._cuts[root].append(now)


class EventSnapshots:
    """Takes snapshots when something happens. `run` is its task; belongs to the trio thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        take: Callable[[SnapshotRequest], Awaitable[Any]],
        alerts: Alerts,
        runtime: RuntimeDirectory,
    ) -> None:
        """Prepare to look.

        Args:
            settings: settings in force.
            roots: supervisors of the roots, by path.
            take: cuts a snapshot.
            alerts: where failures are reported.
            runtime: keeps for a successor what was not cut yet.
        """
        self._settings = settings
        self._roots = roots
        self._take = take
        self._runtime = runtime
        self._written: dict[str, EventRecord] | None = None
        self._alerts = alerts
        self._states: list[_RuleState] = []
        self._epochs: dict[str, tuple[int, float]] = {}
        """Epoch of each root, and when it was first seen: the time of the last cut."""
        self._asked: set[str] = set()
        """Roots whose workers count."""
        self._lost: set[str] = set()
        """Roots that have lost files since the last cut: its snapshot does not end their alerts."""
        self._not_before = 0.0

    async def run(self) -> None:
        """Look every second, until cancelled."""
        await repeat(
            # Since boot: a successor goes on with these times.
            lambda: self.once(time.clock_gettime(time.CLOCK_BOOTTIME)),
            PERIOD_SECONDS,
            "event_snapshots_failed",
            first_seconds=PERIOD_SECONDS,
        )

    async def once(self, now: float) -> None:
        """Take the counts, and cut what is due.

        Args:
            now: seconds since boot.
        """
        rules = self._settings().snapshot_when
        if self._written is None:
            self._written = self._runtime.read_events()
        if tuple(state.rule for state in self._states) != rules:
            known = self._written
            self._states = [_RuleState(rule) for rule in rules]
            for state in self._states:
                if (record := known.get(str(state.rule))) is not None:
                    state.take_over(record, now)
        if not rules and not self._asked:
            return
        for path, root in list(self._roots().items()):
            if root.worker is not None and (rules or path in self._asked):
                await self._look(path, root, now)
        # Before the cut, which may take long: what was counted is known nowhere else.
        self._keep()
        if now >= self._not_before:
            await self._cut(now)
            self._keep()

    def _keep(self) -> None:
        records = {str(state.rule): state.record() for state in self._states}
        if records != self._written:
            self._written = records
            self._runtime.write_events(records)

    async def _look(self, path: str, root: RootSupervisor, now: float) -> None:
        named = [state for state in self._states if state.rule.name is not None]
        sized = [state for state in self._states if state.rule.name is None]
        wanted = WatchedNames(
            rules=tuple((state.rule.kind, state.rule.name or "") for state in named), dirty=bool(sized)
        )
        assert root.worker is not None
        try:
            found: NameCounts = await root.worker.ask(lambda client: client.name_events(wanted))
        except CiuicError as error:
            # Of an older version, until it is replaced, or it has just died: the next look may do better.
            log.debug("worker_counts_no_names", root=path, error=str(error))
            return
        (self._asked.add if wanted.rules else self._asked.discard)(path)
        for state, count in zip(named, found.counts, strict=False):
            if count:
                state.happened(path, now)
        for state, count in zip(named, found.lost, strict=False):
            if count:
                state.hurry(path)
                self._tell_lost(path, state.rule, count)
        epoch, since = self._epochs.get(path, (-1, now))
        if epoch != found.epoch:
            since = now
            self._epochs[path] = found.epoch, now
        for state in sized:
            if found.dirty_bytes >= state.rule.changes_bytes and now - since >= state.rule.after_seconds:
                state.happened(path, now)

    def _tell_lost(self, path: str, rule: SnapshotWhen, count: int) -> None:
        self._lost.add(path)
        log.warning("removed_before_any_snapshot", root=path, rule=str(rule), files=count)
        self._alerts.report(
            f"lost:{path}",
            f"{path}: {plural(count, 'file')} with a name like {rule.name} {'was' if count == 1 else 'were'} removed before any snapshot had "
            f"{'it' if count == 1 else 'them'}",
            hint="keep checkpoints for longer than it takes until a snapshot is cut: see least_between and per_hour of [[snapshot_when]]",
            root=path,
            severity="warning",
        )

    async def _cut(self, now: float) -> None:
        due = {number: state.due(now, self._roots()) for number, state in enumerate(self._states)}
        roots = sorted(set().union(*due.values()))
        if not roots:
            return
        rules = [str(state.rule) for number, state in enumerate(self._states) if due[number]]
        request = SnapshotRequest(roots=roots, message=", ".join(rules), tags=[TAG_EVENT])
        try:
            await self._take(request)
        except CiuicError as error:
            log.error("event_snapshot_failed", roots=roots, error=str(error))
            self._alerts.report("event", f"the snapshot of an event failed: {error}", hint=error.hint)
            self._not_before = now + _RETRY_SECONDS
            return
        self._alerts.clear("event")
        for path in roots:
            if path not in self._lost:
                self._alerts.clear(f"lost:{path}")
        self._lost = set()
        for number, state in enumerate(self._states):
            state.cut(due[number], now)


class OwedSnapshots:
    """Takes owed snapshots. `run` is its task."""

    def __init__(
        self,
        file: Callable[[], str],
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        unprotect: Callable[[str], Awaitable[None]],
        alerts: Alerts,
    ) -> None:
        """Prepare to take them.

        Args:
            file: returns the configuration file; empty for none.
            take: cuts a snapshot.
            roots: supervisors of the roots, by path.
            unprotect: unmounts a root that is no longer configured.
            alerts: where failures are reported.
        """
        self._file = file
        self._take = take
        self._roots = roots
        self._unprotect = unprotect
        self._alerts = alerts
        self._wakeup = Wakeup()
        self._ending: set[str] = set()
        """Roots whose snapshot is taken, and that are still to be unmounted."""

    def retry(self) -> None:
        """Look for owed snapshots: time has passed, a root was mounted, or the configuration was read anew."""
        self._wakeup.set()

    async def run(self) -> None:
        """Take what is owed, until cancelled."""
        while True:
            if file := self._file():
                for owed in await trio.to_thread.run_sync(owed_snapshots, Path(file)):
                    await self._settle(Path(file), owed)
            for path in list(self._ending):
                # An error here would end the daemon; the root's own alert says why it is still mounted.
                with suppress(CiuicError, OSError):
                    await self._end(path)
            await self._wakeup.wait()

    async def _end(self, path: str) -> None:
        """Unmount a root that is no longer configured; where that fails it is tried again."""
        if path in self._ending:
            await self._unprotect(path)
            self._ending.discard(path)
            self._alerts.clear(f"owed:{path}")

    async def _settle(self, file: Path, owed: OwedSnapshot) -> None:
        key = f"owed:{owed.root}"
        root = self._roots().get(owed.root)
        try:
            lost = ""
            if root is not None and root.worker is not None:
                request = SnapshotRequest(roots=[owed.root], message=owed.message, tags=list(owed.tags))
                pending = await self._take(request)
                await pending.finished.wait()
                if pending.failure is not None:
                    raise pending.failure
            elif root is not None and await trio.to_thread.run_sync(
                _is_gone, owed.root, abandon_on_cancel=True
            ):
                lost = root.error
            elif root is not None:
                return  # it is being mounted, or its own alert says why not
            if await trio.to_thread.run_sync(settle_snapshot, file, owed):
                self._ending.add(owed.root)
            await self._end(owed.root)
        except (CiuicError, OSError) as error:
            log.error("owed_snapshot_failed", root=owed.root, error=str(error))
            known = error.hint if isinstance(error, CiuicError) else ""
            self._alerts.report(
                key,
                f"the last snapshot of {owed.root} and the end of its protection are owed: {error}",
                hint=known
                or f"it is tried again; to do without it: ciuic unprotect {shlex.quote(owed.root)}",
            )
        except Exception as error:  # a defect in one snapshot must not end the task
            log.exception("owed_snapshot_failed", root=owed.root)
            self._alerts.report(
                key, f"the last snapshot of {owed.root} was not taken, by a defect: {error!r}"
            )
        else:
            self._alerts.clear(key)
            if lost:
                log.error("owed_snapshot_lost", root=owed.root, error=lost)
                self._alerts.report(
                    key,
                    f"the last snapshot of {owed.root} could not be taken: {lost}",
                    hint="it was moved or removed; it is no longer protected",
                )


def _is_gone(root: str) -> bool:
    """Return whether the protected directory was moved or removed; False if that cannot be determined."""
    try:
        return not stat.S_ISDIR(os.lstat(root).st_mode) or os.path.realpath(root) != root
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


GRACE_SECONDS: Final = 300.0
"""Time that a snapshot may be late beside one interval that may fail."""
_MAX_STEPS: Final = 16
_MAX_CUTS: Final = 64
_STEP_NS: Final = 10**9


def overdue_after_seconds(interval_seconds: float) -> float:
    """Return the age from which the newest snapshot of a root is overdue: two intervals and `GRACE_SECONDS`."""
    return 2 * interval_seconds + GRACE_SECONDS


def boot_ns() -> int:
    """Return the time since boot, with that in which the machine slept."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class SnapshotAges:
    """Ages of the newest snapshot of each root. Any thread may call it."""

    def __init__(
        self,
        runtime: RuntimeDirectory,
        now_ns: Callable[[], int],
        boot_ns: Callable[[], int] = boot_ns,
        boot_id: Callable[[], str] = boot_id,
    ) -> None:
        """Prepare to count; the predecessor's file is read at the first look.

        Args:
            runtime: directory with the file.
            now_ns: wall clock.
            boot_ns: time since boot.
            boot_id: identity of this boot of the kernel.
        """
        self._runtime = runtime
        self._now_ns = now_ns
        self._boot_ns = boot_ns
        self._boot_id = boot_id
        self._known: dict[str, AgeRecord] | None = None
        # By root, the newest snapshot unless it is a safety snapshot, and the time since boot at which this daemon first saw it listed.
        self._listed: dict[str, tuple[str, int]] = {}
        # (Time since boot until which it held, wall clock less time since boot), the oldest first.
        self._earlier: list[tuple[int, int]] = []
        self._difference_ns = now_ns() - boot_ns()
        # Time since boot at the last cuts of this daemon, by id.
        self._cuts: dict[str, int] = {}
        # Status, metrics and housekeeping look from tasks and threads of their own.
        self._lock = threading.Lock()

    async def follow(self, events: EventBus) -> None:
        """Note when snapshots are cut, until cancelled."""
        with events.subscribe() as subscription:
            async for event in subscription.events():
                if event.kind == "snapshot_cut" and event.snapshot is not None:
                    self.cut(event.snapshot.id)

    def cut(self, id_: str) -> None:
        """Note that a snapshot is cut now."""
        with self._lock:
            self._cuts[id_] = self._boot_ns()
            if len(self._cuts) > _MAX_CUTS:
                del self._cuts[next(iter(self._cuts))]

    def note(self, newest: Mapping[str, LastSnapshot | None], *, is_readable: bool) -> None:
        """Take note of the newest committed snapshot of every root.

        Args:
            newest: what the repository lists.
            is_readable: the repository could be read; if not, what was known holds.
        """
        with self._lock:
            # A step of the clock: cuts before it have the time of the clock as it was then.
            difference_ns = self._now_ns() - self._boot_ns()
            if abs(difference_ns - self._difference_ns) >= _STEP_NS:
                self._earlier = [*self._earlier, (self._boot_ns(), self._difference_ns)][-_MAX_STEPS:]
            self._difference_ns = difference_ns
            known = self._records()
            if is_readable:
                self._listed = {root: self._listed_since(root, one) for root, one in newest.items()}
            found: dict[str, AgeRecord] = {}
            for root, snapshot in newest.items():
                id_ = "" if snapshot is None else str(snapshot.id)
                before = known.get(root)
                if before is not None and (before.snapshot == id_ or not is_readable):
                    found[root] = before
                else:
                    since = self._boot_ns() if snapshot is None else self._cut_boot_ns(id_, snapshot.time_ns)
                    found[root] = AgeRecord(snapshot=id_, boot_ns=since)
            if found != known:
                self._known = found
                self._runtime.write_ages(AgeRecords(boot_id=self._boot_id(), roots=found))

    def _listed_since(self, root: str, snapshot: LastSnapshot | None) -> tuple[str, int]:
        id_ = "" if snapshot is None or TAG_SAFETY in snapshot.tags else str(snapshot.id)
        known = self._listed.get(root)
        return known if known is not None and known[0] == id_ else (id_, self._boot_ns())

    def seconds(self, root: str) -> float | None:
        """Return the age of the newest snapshot of a root; None if it has none, or the repository was never read."""
        with self._lock:
            record = self._records().get(root)
            return None if record is None or not record.snapshot else self._since(record)

    def newest(self, before_ns: int, path: str | None = None) -> str:
        """Return the newest snapshot if it is known to be from before an instant; empty if it is not.

        It was in the repository then, whatever clock it has its time from, and is no safety snapshot.

        Args:
            before_ns: the instant, in time since boot.
            path: file that its root holds; None: of any root.
        """
        with self._lock:
            roots = [root for root in self._listed if path is None or path.startswith(root.rstrip("/") + "/")]
            if path is not None:
                # Of nested roots the inner one holds the file.
                roots = [max(roots, key=len)] if roots else []
            found = [(since_ns, id_) for id_, since_ns in map(self._listed.__getitem__, roots) if id_]
        return max((one for one in found if one[0] < before_ns), default=(0, ""))[1]

    def overdue(self, roots: Iterable[str], interval_seconds: float) -> dict[str, bool]:
        """Return the roots whose newest snapshot is overdue, with whether there is one.

        A root without a snapshot counts from when it was first seen without one.
        """
        limit_seconds = overdue_after_seconds(interval_seconds)
        with self._lock:
            known = self._records()
            return {
                root: bool(known[root].snapshot)
                for root in roots
                if root in known and self._since(known[root]) > limit_seconds
            }

    def _since(self, record: AgeRecord) -> float:
        return max(0.0, (self._boot_ns() - record.boot_ns) / 1e9)

    def _records(self) -> dict[str, AgeRecord]:
        if self._known is None:
            record = self._runtime.read_ages()
            self._known = dict(record.roots) if record.boot_id == self._boot_id() else {}
        return self._known

    def _cut_boot_ns(self, id_: str, time_ns: int) -> int:
        """Return the time since boot at a cut: as this daemon saw it, else by the clock as it was then.

        The clock may have been set between the cut and the commit. It is negative for a cut before the boot, and 0 for one in the future.
        """
        seen = self._cuts.get(id_)
        if seen is not None:
            return seen
        found_ns, begin_ns = 0, None
        for until_ns, difference_ns in [*self._earlier, (self._boot_ns(), self._difference_ns)]:
            at_ns = time_ns - difference_ns
            # The first: of two instants that a clock that was put back has given the same time, the earlier one.
            if at_ns <= until_ns and (begin_ns is None or at_ns >= begin_ns):
                found_ns = at_ns
                break
            begin_ns = until_ns
        return found_ns


_JOB = "snapshot"
# Smallest step back that counts as setting the clock; less is clock discipline (NTP).
_STEP = timedelta(minutes=1)
_MESSAGE = "the first snapshot of "


def first_due(now: datetime, last_cut: datetime | None, interval: timedelta) -> datetime:
    """Return when the first snapshot of this daemon is due.

    It is due one interval after the last one, and at once if that has passed.

    A last cut in the future (the clock was put back) is not waited for.
    """
    if last_cut is None or last_cut > now:
        return now
    return max(now, last_cut + interval)


class Schedule:
    """Ticks, one for each interval. Call `start` and `stop` in the trio thread."""

    def __init__(
        self, interval_seconds: int, *, now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    ):
        self._interval = timedelta(seconds=interval_seconds)
        self._now = now
        self._scheduler = BackgroundScheduler(timezone=timezone.utc, daemon=True)
        # Channel with one item for each snapshot that is due.
        # Room for one tick: a further one would only repeat it.
        self._send, self.ticks = trio.open_memory_channel[None](1)

    def start(self, last_cut_ns: int | None) -> None:
        """Begin to tick.

        Args:
            last_cut_ns: wall clock of the newest committed snapshot's cut; None where there is none.
        """
        token = trio.lowlevel.current_trio_token()
        last = datetime.fromtimestamp(last_cut_ns / 1e9, timezone.utc) if last_cut_ns else None
        due = first_due(self._now(), last, self._interval)

        def tick() -> None:
            # In the scheduler's thread, from which a trio channel must not be used directly.
            try:
                token.run_sync_soon(self.post)
            except trio.RunFinishedError:
                log.debug("tick_after_the_end")

        # misfire_grace_time=None: the job runs however late it is. coalesce: it runs once for all times that
        # were missed.
        self._scheduler.add_job(
            tick,
            IntervalTrigger(
                seconds=int(self._interval.total_seconds()), start_date=due, timezone=timezone.utc
            ),
            id=_JOB,
            coalesce=True,
            misfire_grace_time=None,
            max_instances=1,
        )
        self._scheduler.start()
        if due <= self._now():
            # The trigger's first time may already lie a moment in the past; the trigger would then wait a
            # whole interval.
            self.post()
        log.info(
            "schedule_started", interval_seconds=int(self._interval.total_seconds()), first=due.isoformat()
        )

    def post(self) -> None:
        """Tick now; dropped while the last tick still waits."""
        try:
            self._send.send_nowait(None)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("tick_dropped")

    def change_interval(self, interval_seconds: int) -> None:
        """Change the interval. The next tick comes one new interval from now."""
        self._interval = timedelta(seconds=interval_seconds)
        self._scheduler.reschedule_job(
            _JOB,
            trigger=IntervalTrigger(
                seconds=interval_seconds, start_date=self._now() + self._interval, timezone=timezone.utc
            ),
        )

    def heed_clock(self) -> None:
        """Correct the schedule after the clock was set. Call it every half minute or so.

        With the clock put back by a day, the next due time would be a day and an interval away. With the
        clock put forward, the due time has passed while the scheduler's thread still sleeps for the time that
        once seemed to be left.
        """
        due = self.next_due()
        if due is None:
            return
        now = self._now()
        if due > now + self._interval + min(self._interval, _STEP):
            log.warning("clock_put_back", due=due.isoformat(), now=now.isoformat())
            self.change_interval(int(self._interval.total_seconds()))
            # The age of the last snapshot is no longer known, so the next one is due now.
            self.post()
        elif due < now:
            self._scheduler.wakeup()

    def next_due(self) -> datetime | None:
        """Return the time of the next tick; None before the start and after the end."""
        if not self._scheduler.running:
            return None
        job = self._scheduler.get_job(_JOB)
        return job.next_run_time if job is not None else None

    def stop(self) -> None:
        """End the ticks."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        self._send.close()


class ScheduledSnapshots:
    """Answers the schedule's ticks. `run` is its task; belongs to the trio thread."""

    def __init__(
        self,
        ticks: trio.MemoryReceiveChannel[None],
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        under_way: Callable[[], Collection[str]],
        alerts: Alerts,
    ) -> None:
        """Prepare to answer ticks.

        Args:
            ticks: channel with one item for each snapshot that is due.
            take: cuts a snapshot.
            roots: supervisors of the roots, by path.
            under_way: returns the roots with a scheduled snapshot that is not captured yet.
            alerts: where failures are reported.
        """
        self.retry = False
        """The last snapshot failed; housekeeping asks for another one soon."""
        self._ticks = ticks
        self._take = take
        self._roots = roots
        self._under_way = under_way
        self._alerts = alerts

    async def run(self) -> None:
        """Answer ticks until the schedule ends."""
        async for _ in self._ticks:
            await self._tick()

    async def _tick(self) -> None:
        roots = self._roots()
        behind = set(self._under_way()) & roots.keys()
        if behind:
            self._tell_behind(behind)
        due = [path for path, root in roots.items() if path not in behind and root.worker is not None]
        if not roots or (behind and not due):
            return
        try:
            # A request without roots is for all of them, and its snapshot says which are not mounted.
            await self._take(SnapshotRequest(roots=due if behind else []))
        except CiuicError as error:
            log.error("scheduled_snapshot_failed", error=str(error))
            self._alerts.report("schedule", f"the scheduled snapshot failed: {error}", hint=error.hint)
            self.retry = True
        except Exception as error:
            # A defect in one snapshot must not end the service that takes the next one. A lack of descriptors
            # or memory comes here too, and passes.
            log.exception("scheduled_snapshot_failed")
            self._alerts.report("schedule", f"the scheduled snapshot failed by a defect: {error!r}")
            self.retry = True
        else:
            self._alerts.clear("schedule")
            if not behind:
                self._alerts.clear("behind")

    def _tell_behind(self, paths: Collection[str]) -> None:
        log.warning("scheduled_snapshot_skipped", roots=sorted(paths))
        self._alerts.report(
            "behind",
            f"a scheduled snapshot of {', '.join(sorted(paths))} was skipped: the one before it is not captured yet",
            hint="choose a longer interval, or look at what slows the store down",
            severity="warning",
        )


def last_cut_ns(store: Store, roots: Iterable[str]) -> int | None:
    """Return the cut of the newest snapshot of the root that is longest without one. Blocks.

    Return None where a root has no snapshot, or the repository cannot be read: the schedule begins at once
    then.
    """
    try:
        latest = store.latest_of(roots)
    except CiuicError as error:
        log.error("store_unreadable", error=str(error))
        return None
    found = [info.time_ns for info in latest.values() if info is not None]
    return min(found) if found and len(found) == len(latest) else None


class FirstSnapshots:
    """Takes first snapshots. `run` is its task; belongs to the trio thread."""

    def __init__(
        self,
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        alerts: Alerts,
    ) -> None:
        self.waiting: set[str] = set()
        """Roots whose first snapshot was not cut yet."""
        self._take = take
        self._roots = roots
        self._alerts = alerts
        self._wakeup = Wakeup()

    def wanted(self, path: str) -> None:
        """Ask for the first snapshot of a root that was protected just now."""
        self.waiting.add(path)
        self.retry()

    def retry(self) -> None:
        """Try again: a root was mounted, or time has passed since the last attempt."""
        if self.waiting:
            self._wakeup.set()

    async def run(self) -> None:
        """Take first snapshots, until cancelled."""
        while True:
            await self._wakeup.wait()
            self.waiting &= self._roots().keys()  # some may not be protected any more
            ready = [path for path in sorted(self.waiting) if self._roots()[path].worker is not None]
            if ready:
                await self._take_first(ready)

    async def _take_first(self, paths: list[str]) -> None:
        try:
            pending = await self._take(SnapshotRequest(roots=paths, message=_MESSAGE + ", ".join(paths)))
        except CiuicError as error:
            log.error("first_snapshot_failed", roots=paths, error=str(error))
            self._alerts.report(
                "schedule", f"the first snapshot of {', '.join(paths)} failed: {error}", hint=error.hint
            )
        except Exception as error:  # a defect in one snapshot must not end the task
            log.exception("first_snapshot_failed", roots=paths)
            self._alerts.report(
                "schedule", f"the first snapshot of {', '.join(paths)} failed by a defect: {error!r}"
            )
        else:
            self.waiting -= set(pending.state.roots)
            self._alerts.clear("schedule")
