"""Snapshots when something happens in a root: a rename, a new name, the end of a writer, or enough changed bytes.

The overlay workers count what happens to the names of ``[[snapshot_when]]`` (fuse_layer/state/passthrough_state.py); this task takes the
counts every second, while there are rules. Guarantees: a burst gives one snapshot, cut when a rule's names have been quiet for two
seconds, at most half a minute after the first; rules that are due together share a snapshot; a rule cuts no sooner than
``least_between`` after its last one of a root and no more than ``per_hour`` times an hour of it, and what has happened meanwhile is cut
when it may again, by the daemon that follows where this one is killed. A worker that has died and was replaced counts from the daemon's next look on.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import structlog

from ciuic.config import SnapshotWhen
from ciuic.daemon.base.events import Alerts, repeat
from ciuic.daemon.base.runtime import EventRecord, RuntimeDirectory
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import SnapshotRequest
from ciuic.protocol.worker_frames import NameCounts, WatchedNames
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
