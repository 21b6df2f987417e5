"""Periodic checks of the daemon, every half minute.

Guarantees: an epoch whose outcome a worker was not told is settled; an epoch that a worker gave up, a store
short of space, a remote that falls behind, a clock that was set and processes that bypass the overlay are
alerts, as is a root whose newest snapshot is overdue; `systemctl status` shows an up-to-date line.

A clock that was set is detected by comparing wall time with the time since boot, which cannot be set. A host
that slept does not count as a clock that was set (CLOCK_BOOTTIME counts sleep), nor does a clock that NTP
adjusts a little at a time. Leaves the consequences to schedule.py and ciuic.retention.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import structlog
import trio

from ciuic import STATE_DIR_NAME
from ciuic.daemon.base.events import KEY_MISSING, Alerts, repeat
from ciuic.daemon.base.repository_store import LastSnapshot, Store
from ciuic.daemon.parts import DaemonParts
from ciuic.daemon.roots.worker_process import OverlayWorker
from ciuic.daemon.snapshots.schedule import boot_ns, overdue_after_seconds
from ciuic.errors import CiuicError
from ciuic.printable import one_line
from ciuic.protocol.control_types import DamageStatus, RepositoryStatus, rfc3339
from ciuic.protocol.known_damage import DAMAGE_HINT, KEY_DAMAGE, damage_status, damage_words, read_damage
from ciuic.repository import Repository
from ciuic.units import human_duration, human_size, plural

# Each round asks every worker for its status and looks at the repository.
_PERIOD_SECONDS = 30.0
# Floor of free space where none is configured: below it even the smallest checkpoint may not fit.
_LOW_SPACE_BYTES = 1 << 30
# Share of a file system of less than 20 GiB that is the floor instead.
_LOW_SPACE_SHARE = 0.05
# Beginning of the key of the alert that a remote is behind.
_KEY_REMOTE = "remote:"
_KEY_FULL = "full"
_KEY_GOOD = "last-good:"
_KEY_OVERDUE = "overdue:"
# Less than this is clock discipline (NTP), not a clock that was set.
_STEP_SECONDS = 60.0
log = structlog.get_logger(__name__)


def _newest(store: Store, roots: list[str]) -> tuple[dict[str, LastSnapshot | None], bool]:
    """Return the newest snapshot of each root, and whether the repository could be read."""
    try:
        # Without a repository `latest_of` finds nothing, as where its disk is not mounted.
        return store.latest_of(roots), store.path is not None and Repository.exists(store.path)
    except CiuicError as error:
        log.warning("store_unreadable", error=str(error))
        return dict.fromkeys(roots), False


class ClockWatch:
    """Comparison of both clocks from one call to the next."""

    def __init__(
        self,
        now_ns: Callable[[], int],
        boot_ns: Callable[[], int] = boot_ns,
    ) -> None:
        self._now_ns = now_ns
        self._boot_ns = boot_ns
        self._difference_ns = now_ns() - boot_ns()

    def moved_seconds(self) -> float:
        """Return how far the clock was put forward (positive) or back since the last call.

        Return 0 for less than a minute.
        """
        before, self._difference_ns = self._difference_ns, self._now_ns() - self._boot_ns()
        moved = (self._difference_ns - before) / 1e9
        return moved if abs(moved) >= _STEP_SECONDS else 0.0


def tell_damage(alerts: Alerts, damage: DamageStatus | None) -> None:
    """Report damage of the repository that is known."""
    if damage is None:
        alerts.clear(KEY_DAMAGE)
    else:
        alerts.report(KEY_DAMAGE, damage_words(damage), hint=DAMAGE_HINT)


class DaemonHousekeeping:
    """Task of the periodic checks."""

    def __init__(self, parts: DaemonParts) -> None:
        self._parts = parts
        self._clock = ClockWatch(parts.now_ns)

    async def run(self) -> None:
        """Check every `_PERIOD_SECONDS`, until cancelled."""
        await repeat(self.once, _PERIOD_SECONDS, "housekeeping_failed", first_seconds=_PERIOD_SECONDS)

    async def once(self) -> None:
        """Do one round of checks."""
        # A copy: a reload may add and remove roots during every await below.
        for path, supervisor in list(self._parts.roots.supervisors.items()):
            worker = supervisor.worker
            if worker is not None:
                await self._look_at_worker(path, worker)
                await self._parts.snapshots.reconcile(path, worker)
                await supervisor.refresh_bypassing()
        # Notes gaps that a search has found meanwhile, and what could not be written before.
        self._parts.snapshots.capturing.trust.note()
        self._look_at_clock()
        # A failed scheduled snapshot is tried again at the next round, not a whole interval later.
        if self._parts.scheduled.retry:
            self._parts.scheduled.retry = False
            self._parts.schedule.post()
        self._parts.first_snapshots.retry()
        self._parts.owed.retry()
        await self._look_at_ages()
        self._look_at_checkpoints()
        await self._look_at_space()
        await self._look_at_damage()
        await self._look_at_remotes()
        self._parts.notifier.status(self.status_line())

    async def _look_at_worker(self, path: str, worker: OverlayWorker) -> None:
        key = f"abandoned:{path}"
        try:
            status = await worker.ask(lambda client: client.status())
        except CiuicError as error:
            log.warning("worker_not_asked", root=path, error=str(error))
            self._parts.alerts.report(
                f"silent:{path}",
                f"the overlay worker of {path} (pid {worker.pid}) does not answer",
                hint="a disk below the root may hang; a worker that hangs itself is replaced where its session outlives it",
                root=path,
            )
            return
        self._parts.alerts.clear(f"silent:{path}")
        if status.renewed:
            self._parts.alerts.report(
                f"state:{path}",
                f"another program deleted what ciuic keeps beside {path} ({os.fsdecode(STATE_DIR_NAME)}); it was made anew, and snapshots go on",
                hint="find out what deletes it, such as git clean -fdx in a directory above; the next snapshot may compare the whole tree",
                root=path,
                severity="warning",
            )
        # An abandoned epoch before the last commit is no problem any more: its changes are in that snapshot.
        standing = [one for one in status.abandoned if one.epoch > status.since]
        if not standing:
            self._parts.alerts.clear(key)
            return
        newest = standing[-1]
        when = f" at {rfc3339(newest.time_ns)}" if newest.time_ns else ""
        self._parts.alerts.report(
            key,
            f"{path}: the snapshot of epoch {newest.epoch} was given up{when}: {newest.reason}",
            hint="its changes will be in the next snapshot; raise [capture] undo_limit if this repeats",
            root=path,
            severity="warning",
        )

    def _look_at_clock(self) -> None:
        moved_seconds = self._clock.moved_seconds()
        if moved_seconds:
            way = "forward" if moved_seconds > 0 else "back"
            log.warning("clock_set", moved_seconds=round(moved_seconds))
            self._parts.alerts.report(
                "clock",
                f"the clock was put {way} by {human_duration(abs(moved_seconds))}",
                hint="times of snapshots may be wrong; none is removed for it (docs/configuration.md, keep_within)",
                severity="warning",
            )
        self._parts.schedule.heed_clock()

    async def _look_at_ages(self) -> None:
        """Report roots whose newest snapshot is overdue."""
        parts = self._parts
        roots = [root.path for root in parts.settings.roots]
        found, is_readable = await trio.to_thread.run_sync(_newest, parts.store, roots)
        parts.ages.note(found, is_readable=is_readable)
        overdue = parts.ages.overdue(roots, parts.settings.interval_seconds)
        for alert in parts.alerts.standing():
            if alert.key.startswith(_KEY_OVERDUE) and alert.root not in overdue:
                parts.alerts.clear(alert.key)
        limit = human_duration(overdue_after_seconds(parts.settings.interval_seconds))
        every = human_duration(parts.settings.interval_seconds)
        for path, exists in overdue.items():
            # The limit and not the age, which would make another wording each half minute.
            what = (
                f"the newest snapshot of {path} is older than {limit}"
                if exists
                else f"there is no snapshot of {path} after {limit}"
            )
            parts.alerts.report(
                f"{_KEY_OVERDUE}{path}",
                f"{what}, and one is due every {every}",
                hint="other alerts say why; ciuic snapshot takes one now",
                root=path,
            )

    def _look_at_checkpoints(self) -> None:
        """Report roots whose newest GOOD checkpoint is too old."""
        alerts = self._parts.alerts
        limits = {root.path: root.last_good_within_seconds for root in self._parts.settings.roots}
        old = self._parts.good_checkpoints.too_old(limits.items())
        for alert in alerts.standing():
            if alert.key.startswith(_KEY_GOOD) and alert.root not in old:
                alerts.clear(alert.key)
        for root, path in old.items():
            limit = human_duration(limits[root])
            alerts.report(
                f"{_KEY_GOOD}{root}",
                f"the newest GOOD checkpoint of {root}, {one_line(path)}, is older than {limit}"
                if path
                else f"no checkpoint of {root} was GOOD for {limit}",
                hint="ciuic checkpoints shows what the newest snapshot has, and why it is not GOOD",
                root=root,
            )

    async def _look_at_space(self) -> None:
        settings, alerts = self._parts.settings, self._parts.alerts
        if settings.repository is None:
            return
        facts = await trio.to_thread.run_sync(self._parts.space.measure)
        if facts.missing:
            alerts.report(KEY_MISSING, f"no snapshot can be taken: {facts.missing}", hint=facts.missing_hint)
        # A repository that was never created is neither missing nor there.
        elif facts.exists:
            alerts.clear(KEY_MISSING)
        if facts.made_apart_from:
            alerts.report(
                "identity",
                f"there was no repository at {facts.path}: the daemon made one that shares no chunks with the remote "
                f"{facts.made_apart_from}",
                hint="snapshots are uploaded beside those of other hosts; to share chunks: stop the daemon, remove the "
                "repository, and let ciuic protect make it",
                severity="warning",
            )
        await trio.to_thread.run_sync(self._parts.forecast.note, facts)
        self._tell_forecast(facts)
        if settings.min_free is not None:
            floor = settings.min_free.floor_bytes(facts.total_bytes)
        else:
            floor = min(_LOW_SPACE_BYTES, int(_LOW_SPACE_SHARE * facts.total_bytes))
        if facts.total_bytes and facts.free_bytes < floor:
            alerts.report(
                "space",
                f"the store's file system has {human_size(facts.free_bytes)} free, less than {human_size(floor)}",
                hint="shorten [retention], move the repository, or free space: ciuic prune",
            )
            self._parts.upkeep.suggest()
        else:
            alerts.clear("space")

    async def _look_at_damage(self) -> None:
        place = self._parts.settings.repository
        if place is not None:
            known = await trio.to_thread.run_sync(read_damage, place)
            tell_damage(self._parts.alerts, damage_status(known))

    def _tell_forecast(self, facts: RepositoryStatus) -> None:
        """Report a file system that will soon be full."""
        alerts, limit_seconds = self._parts.alerts, self._parts.settings.alert.full_within_seconds
        self._parts.forecast.apply(facts)
        # Above the limit by a quarter it ends: a rate near the limit would raise and clear it all day.
        ends_seconds = limit_seconds * (1.25 if _KEY_FULL in alerts else 1.0)
        if facts.full_in_seconds is None or facts.full_in_seconds >= ends_seconds:
            alerts.clear(_KEY_FULL)
            return
        mostly = (
            "the repository"
            if facts.own_growth_bytes_per_day >= facts.growth_bytes_per_day / 2
            else "other data than the repository"
        )
        # The limit and not the forecast, which would make another wording each half minute.
        alerts.report(
            _KEY_FULL,
            f"the store's file system will be full within {human_duration(limit_seconds)} at the rate of the last week; "
            f"it is mostly {mostly} that grows",
            hint="shorten [retention], move the repository, or free space: ciuic prune",
            severity="warning",
        )

    async def _look_at_remotes(self) -> None:
        alerts, max_lags = self._parts.alerts, dict(self._parts.settings.max_lags)
        # A remote that is no longer configured, or without a limit since a reload.
        for alert in alerts.standing():
            if alert.key.startswith(_KEY_REMOTE) and alert.key.removeprefix(_KEY_REMOTE) not in max_lags:
                alerts.clear(alert.key)
        if not max_lags:
            return
        store, now_ns = self._parts.store, self._parts.now_ns()
        limited = [one for one in self._parts.settings.remotes if one.name in max_lags]
        for remote in await trio.to_thread.run_sync(partial(store.remotes, limited, now_ns=now_ns)):
            key = f"{_KEY_REMOTE}{remote.name}"
            if remote.seconds <= max_lags[remote.name]:
                alerts.clear(key)
                continue
            # The limit and not the lag, which would make another wording each half minute.
            alerts.report(
                key,
                f"remote {remote.name} is behind by more than {human_duration(max_lags[remote.name])}: "
                f"{remote.problem or 'it lacks the newest snapshots'}",
                hint="ciuic remote status says what it waits for",
            )

    def status_line(self) -> str:
        """Return the line for `systemctl status`."""
        supervisors = self._parts.roots.supervisors.values()
        mounted = sum(supervisor.state == "mounted" for supervisor in supervisors)
        parts = [f"{mounted} of {plural(len(supervisors), 'root')} protected"]
        last = self._parts.snapshots.capturing.last_cut_ns
        if last:
            age_seconds = max(0.0, (self._parts.now_ns() - last) / 1e9)
            parts.append(f"last snapshot {human_duration(age_seconds)} ago")
        alerts = len(self._parts.alerts.standing())
        if alerts:
            parts.append(f"{plural(alerts, 'alert')}: ciuic status")
        return ", ".join(parts)
