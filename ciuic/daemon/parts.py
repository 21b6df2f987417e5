"""Parts of the daemon, each made with what it needs.

What two parts need of each other is made before both: the supervisors of the roots, and the signals that wake a
task. Leaves to service.py when the parts start and stop, and what the control API asks of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ciuic.config import Config, check_overlaps
from ciuic.daemon.base.accounts import AccountNames, Accounts
from ciuic.daemon.base.events import Alerts, EventBus, Wakeup
from ciuic.daemon.base.metrics import Metrics, SpanWriter
from ciuic.daemon.base.process_priority import SLICE, PriorityControl, SliceWeight
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.base.settings import ActiveSettings, Settings
from ciuic.daemon.drills import Drills
from ciuic.daemon.jobs import job_command
from ciuic.daemon.preemption import Preemption
from ciuic.daemon.roots.sessions import SessionKeeper, SessionStore
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.served_roots import ServedRoots
from ciuic.daemon.snapshots.capture_process import Captures
from ciuic.daemon.snapshots.capturing import Context
from ciuic.daemon.snapshots.requests import HeldSnapshots, Snapshots
from ciuic.daemon.snapshots.schedule import (
    EventSnapshots,
    FirstSnapshots,
    OwedSnapshots,
    Schedule,
    ScheduledSnapshots,
    SnapshotAges,
)
from ciuic.daemon.snapshots.space_watch import SpaceForecast, SpaceWatch
from ciuic.daemon.trainers.loss_watch import NumberWatch
from ciuic.daemon.trainers.pairing import Pairing
from ciuic.daemon.trainers.watch import TrainerWatch
from ciuic.daemon.upkeep import Upkeep
from ciuic.daemon.verdicts import GoodCheckpoints, Verdicts
from ciuic.errors import Unreachable
from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.protocol.pairing import SOCKET_NAME
from ciuic.protocol.span_spool import SPANS_NAME
from ciuic.system import mountinfo
from ciuic.system.child_process import environment
from ciuic.system.sd_daemon import Notifier


class DaemonParts:
    """Record of the parts of one daemon. Making it starts nothing."""

    def __init__(
        self,
        config: Config,
        *,
        load: Callable[[], Config],
        notifier: Notifier,
        now_ns: Callable[[], int],
        stored_fds: dict[str, int],
        command_prefix: Sequence[str],
        worker_service: str,
    ) -> None:
        """Make the parts.

        Args:
            config: configuration to start with.
            load: reads the configuration again.
            notifier: connection to systemd.
            now_ns: wall clock.
            stored_fds: descriptors that systemd kept over a restart, by name.
            command_prefix: words before the commands of captures and upkeep (process_priority.py).
            worker_service: socket of ciuic-workers.service (prefork/service.py); empty: workers are children.

        Raises:
            ConfigError: the configuration is not valid.
        """
        self.active = ActiveSettings(config, load)
        self.notifier = notifier
        self.now_ns = now_ns
        self.started_ns = now_ns()
        self.stopping = False
        self.slice = SLICE if command_prefix else ""
        """systemd slice of captures and upkeep; empty where they run beside the daemon."""
        supervisors: dict[str, RootSupervisor] = {}
        urgency_changed, space_wanted, committed = Wakeup(), Wakeup(), Wakeup()

        # A reload replaces settings and store, so parts ask for them anew each time.
        def settings() -> Settings:
            return self.active.settings

        def store() -> Store:
            return self.active.store

        def roots() -> Mapping[str, RootSupervisor]:
            return supervisors

        def space_is_wanted() -> None:
            space_wanted.set()
            committed.set()

        self.events = EventBus(now_ns)
        self.alerts = Alerts(self.events, now_ns)
        for problem in check_overlaps(config.roots, mountinfo.read()):
            self.alerts.report("roots", str(problem), hint=problem.hint)
        self.metrics_registry = Metrics()
        self.runtime = RuntimeDirectory(self.settings.runtime_dir)

        # From a due snapshot to its capture.
        self.space = SpaceWatch(settings, store, time.monotonic)
        self.forecast = SpaceForecast(now_ns)
        self.ages = SnapshotAges(self.runtime, now_ns)
        self.schedule = Schedule(self.settings.interval_seconds)
        self.captures = Captures(self.runtime.path, command_prefix)
        self.snapshots = Snapshots(
            Context(
                settings=settings,
                roots=roots,
                store=store,
                runtime=self.runtime,
                alerts=self.alerts,
                events=self.events,
                now_ns=now_ns,
                host=os.uname().nodename,
                new_capture=self.captures.new,
                space=self.space,
                spans=SpanWriter(
                    self.runtime.path / SPANS_NAME,
                    lambda: self.settings.exports_spans,
                    lambda: self.store.path,
                ),
                ends=lambda: self.preemption.is_near,
                on_urgency=urgency_changed.set,
                on_space_wanted=space_is_wanted,
                on_scheduled_lost=self.schedule.post,
            )
        )
        self.held_snapshots = HeldSnapshots(self.snapshots)
        take = partial(self.snapshots.take, scheduled=True)
        self.first_snapshots = FirstSnapshots(take, roots, self.alerts)
        self.scheduled = ScheduledSnapshots(
            self.schedule.ticks, take, roots, self.snapshots.scheduled_roots, self.alerts
        )

        self.event_snapshots = EventSnapshots(settings, roots, self.snapshots.take, self.alerts, self.runtime)

        # The roots, and the workers that serve them.
        spare = SpareProcess(
            self.runtime.path, environment(), service=worker_service, keeps=not worker_service
        )
        keeper = None if worker_service else SessionKeeper(spare, self.runtime.path)
        self.sessions = SessionStore(notifier, stored_fds, keeper)
        self.roots = ServedRoots(
            settings=settings,
            runtime=self.runtime,
            store=store,
            alerts=self.alerts,
            events=self.events,
            snapshots=self.snapshots,
            on_mounted=self.first_snapshots.retry,
            supervisors=supervisors,
            sessions=self.sessions,
            spare=spare,
        )

        self.owed = OwedSnapshots(
            lambda: self.settings.config_path, self.snapshots.take, roots, self.unprotect, self.alerts
        )

        # What acts on committed snapshots, and the priorities beside the job.
        self.upkeep = Upkeep(
            settings,
            store,
            self.snapshots.capturing.repository_lock,
            self.alerts,
            cwd=self.settings.runtime_dir,
            now_ns=now_ns,
            command=[*command_prefix, *job_command("upkeep")],
            reserve_bytes=lambda: self.space.measure().reserve_bytes,
            caller_waits=lambda: self.snapshots.caller_waits,
            wakeup=space_wanted,
        )
        self.drills = Drills(
            settings,
            self.alerts,
            cwd=self.settings.runtime_dir,
            now_ns=now_ns,
            command=[*command_prefix, *job_command("drill")],
            is_busy=lambda: bool(self.snapshots.capturing.running() or self.upkeep.running()),
        )
        self.good_checkpoints = GoodCheckpoints(now_ns)
        self.verdicts = Verdicts(
            settings,
            committed,
            cwd=self.settings.runtime_dir,
            command=[*command_prefix, *job_command("verdicts")],
            good=self.good_checkpoints,
        )
        self.priorities = PriorityControl(
            (self.snapshots.capturing.running, self.upkeep.running),
            lambda: self.settings.io_priority,
            SliceWeight() if command_prefix else None,
            wakeup=urgency_changed,
        )

        # What other users' processes talk to.
        self.accounts = Accounts(
            lambda: AccountNames(self.settings.group, self.settings.watch.users),
            self.alerts,
            control_socket=self.settings.socket,
        )
        self.watch = TrainerWatch(
            settings=settings,
            take=self.snapshots.take,
            roots=roots,
            accounts=self.accounts,
            alerts=self.alerts,
            events=self.events,
            now_ns=now_ns,
            as_service=bool(self.slice),
            newest_snapshot=self.ages.newest,
        )
        self.numbers = NumberWatch(
            settings, self.alerts, cwd=self.settings.runtime_dir, newest_snapshot=self.ages.newest
        )
        self.preemption = Preemption(
            settings,
            self.snapshots.take,
            self.alerts,
            self.events,
            cwd=self.settings.runtime_dir,
            as_service=bool(self.slice),
            on_urgency=urgency_changed.set,
        )
        self.pairing = Pairing(
            self.runtime.path / SOCKET_NAME,
            holds=lambda: self.settings.holds,
            store=store,
            roots=roots,
            snapshots=self.snapshots,
            alerts=self.alerts,
            group_id=lambda: self.accounts.group_id,
            watched_users=self.watch.uids,
            is_stopping=lambda: self.stopping,
        )

    @property
    def settings(self) -> Settings:
        """Settings in force."""
        return self.active.settings

    @property
    def store(self) -> Store:
        """Repository of the settings in force."""
        return self.active.store

    async def unprotect(self, path: str) -> None:
        """Unmount a root that is no longer in the configuration. CiuicError."""
        await self.roots.remove(path)
        self.active.remove_root(path)

    def take_over(self, settings: Settings) -> None:
        """Put new settings in force, as far as they can change under running workers."""
        self.active.replace(settings)
        self.snapshots.capturing.settings_changed()

    def refuse_when_stopping(self) -> None:
        """Raise Unreachable when the daemon is stopping."""
        if self.stopping:
            raise Unreachable("the daemon is stopping", hint="try again when it has started")
