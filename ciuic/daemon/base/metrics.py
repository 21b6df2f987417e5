"""Metrics in Prometheus text format, from a status document and a few counters, and the file of the exporter.

Guarantees: names are stable; every figure has its unit in its name. No failure of the metrics ends the daemon.
The registry is this module's own, so
that the metrics of a process that embeds the daemon are not mixed with these.

A span of each snapshot, into the spool of the exporter.

Guarantees: nothing is written unless `exporter.otlp` is configured; no failure of it costs a snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, get_args

import structlog
import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ciuic.daemon.base.events import EventBus
from ciuic.protocol.control_types import (
    DrillStatus,
    Event,
    IncidentKind,
    Progress,
    RootStatus,
    StatusDocument,
)
from ciuic.protocol.metrics_file import WRITE_SECONDS, write_metrics
from ciuic.protocol.span_spool import Attribute, Span, append_spans
from ciuic.repository.config import read_config

log = structlog.get_logger(__name__)


class SnapshotCourse(NamedTuple):
    """Course of a snapshot from its cut to its end, by the wall clock."""

    snapshot: str
    cut_ns: int
    end_ns: int
    figures: Mapping[str, Attribute]
    error: str = ""
    """Why it failed; empty: it is committed."""


class SpanWriter:
    """Writer of the daemon's spool."""

    def __init__(
        self, path: Path, is_wanted: Callable[[], bool], repository: Callable[[], Path | None]
    ) -> None:
        self._path = path
        self._is_wanted = is_wanted
        self._repository = repository
        self._is_failing = False

    async def write(self, course: SnapshotCourse) -> None:
        """Write the span of a snapshot, if an exporter sends it."""
        if not self._is_wanted():
            return
        try:
            await trio.to_thread.run_sync(self._append, self._repository(), course)
            self._is_failing = False
        except Exception:  # nothing of the spans may cost a snapshot
            # Once, not with each snapshot.
            if not self._is_failing:
                log.exception("spans_not_written", path=str(self._path))
            self._is_failing = True

    def _append(self, repository: Path | None, course: SnapshotCourse) -> None:
        if repository is not None:
            span = Span(
                repository=read_config(os.fspath(repository)).id,
                snapshot=course.snapshot,
                start_ns=course.cut_ns,
                # The clock may have been set back meanwhile.
                end_ns=max(course.cut_ns, course.end_ns),
                error=course.error,
                attributes={
                    "ciuic.snapshot.outcome": "failed" if course.error else "committed",
                    **course.figures,
                },
            )
            append_spans(self._path, [span])


_ROOT_GAUGES = (
    ("dirty_bytes", "ciuic_root_dirty_bytes", "Upper bound of what the next snapshot reads"),
    ("undo_bytes", "ciuic_root_undo_bytes", "Undo log of epochs that are cut and not yet captured"),
    ("open_files", "ciuic_root_open_files", "Handles open through the overlay"),
    ("epoch", "ciuic_root_epoch", "Current epoch"),
    ("restarts", "ciuic_root_worker_restarts", "Times the overlay worker died under this daemon"),
    ("requests", "ciuic_root_requests", "FUSE requests served by the current worker"),
    (
        "waited_seconds",
        "ciuic_root_waited_seconds",
        "Time in which requests have waited in the current worker, for the disk as a rule",
    ),
)
_REMOTE_GAUGES = (
    ("snapshots", "ciuic_remote_behind_snapshots", "Snapshots that wait for the remote"),
    ("size_bytes", "ciuic_remote_behind_bytes", "Bytes by which these let the packs grow"),
    (
        "seconds",
        "ciuic_remote_behind_seconds",
        "Age of the oldest waiting snapshot that is newer than all stored ones",
    ),
    ("stored", "ciuic_remote_stored_snapshots", "Snapshots of the repository that the remote has"),
)


class Metrics:
    """Counters that grow with events, and gauges that are set from a status document on request."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        # prometheus_client appends `_total` to the name of a counter.
        self.snapshots = Counter(
            "ciuic_snapshots", "Snapshots by how they ended", ["outcome"], registry=self._registry
        )
        # Every series exists from the start: rate() of a series that appears with its first increment misses
        # that increment.
        for outcome in ("committed", "failed"):
            self.snapshots.labels(outcome)
        self.new_bytes = Counter(
            "ciuic_snapshot_new_bytes", "Bytes added to the store", registry=self._registry
        )
        self.hold_seconds = Histogram(
            "ciuic_cut_hold_seconds",
            "How long changing operations were stopped for a cut",
            # Measured: 0.3 ms in the median, 0.9 ms at the 99th percentile, 6.4 ms at most
            # (benchmarks/results/2026-11-kernel-hold.md).
            buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0),
            registry=self._registry,
        )
        self._mounted = self._gauge("ciuic_root_mounted", "1 if the overlay is over the root", ["root"])
        self._roots = {field: self._gauge(name, text, ["root"]) for field, name, text in _ROOT_GAUGES}
        self._pending = self._gauge("ciuic_snapshots_pending", "Snapshots cut and not yet committed")
        self._share = self._gauge(
            "ciuic_capture_share",
            "Share of its time that the capture works in; below 1 it makes way for others",
        )
        self._others = self._gauge(
            "ciuic_capture_others_waiting",
            "Share of the time in which others lately waited for the disk, as the running capture heard it",
        )
        self._writing = self._gauge(
            "ciuic_capture_others_writing_bytes_per_second",
            "What others lately wrote, as the running capture heard it",
        )
        self._paused = self._gauge(
            "ciuic_capture_paused_seconds", "What the running capture has spent listening and making way"
        )
        self._last = self._gauge(
            "ciuic_last_snapshot_timestamp_seconds", "Cut of the newest committed snapshot"
        )
        self._last_of_root = self._gauge(
            "ciuic_root_last_snapshot_timestamp_seconds",
            "Cut of the newest committed snapshot that has the root; absent where there is none",
            ["root"],
        )
        self._age_of_root = self._gauge(
            "ciuic_root_snapshot_age_seconds",
            "Age of the newest committed snapshot that has the root, whatever the clock is set to; absent where there is none",
            ["root"],
        )
        self._good = self._gauge(
            "ciuic_root_last_good_checkpoint_age_seconds",
            "Age of the newest checkpoint that is GOOD by its stored verdict; absent where none is",
            ["root"],
        )
        self._stored = self._gauge("ciuic_store_bytes", "Bytes in the store's packs")
        self._free = self._gauge(
            "ciuic_store_free_bytes", "What an ordinary process can use of the store's file system"
        )
        self._reserve = self._gauge("ciuic_store_reserve_bytes", "What captures leave of that to others")
        self._growth = self._gauge(
            "ciuic_store_growth_bytes_per_day",
            "Rate of the last week at which the use of the store's file system grows",
        )
        # With a label set of its own, so that it can be absent.
        self._full = self._gauge(
            "ciuic_store_full_in_seconds",
            "Time until that file system is full at this rate; absent while it is not known, or does not grow",
            ["path"],
        )
        self._count = self._gauge("ciuic_store_snapshots", "Committed snapshots")
        self._damaged = self._gauge(
            "ciuic_store_damaged_places", "Files and directories that are known to be damaged in the store"
        )
        self._remotes = {field: self._gauge(name, text, ["remote"]) for field, name, text in _REMOTE_GAUGES}
        self._drill = self._gauge(
            "ciuic_remote_last_drill_timestamp_seconds",
            "End of the last drill of a rescue from the remote; absent where there was none",
            ["remote"],
        )
        self._drill_ok = self._gauge(
            "ciuic_remote_last_drill_ok", "1 if that drill proved that a rescue works", ["remote"]
        )
        self._own_drill = self._gauge(
            "ciuic_last_drill_timestamp_seconds",
            "End of the last drill of a restore from the repository; 0: there was none",
        )
        self._own_drill_ok = self._gauge(
            "ciuic_last_drill_ok", "1 if that drill proved that a restore is exact"
        )
        self._own_drill_every = self._gauge(
            "ciuic_drill_interval_seconds", "Time from one drill to the next; 0: the daemon does none"
        )
        self.incidents = Counter(
            "ciuic_trainer_incidents", "What happened to trainers", ["kind"], registry=self._registry
        )
        for kind in get_args(IncidentKind):
            self.incidents.labels(kind)
        self._trainers = self._gauge("ciuic_trainers", "Trainers that are watched", ["state"])
        self._steps = self._gauge("ciuic_trainer_step", "Last step that a trainer reported", ["trainer"])
        self._beats = self._gauge(
            "ciuic_trainer_beat_timestamp_seconds",
            "Last heartbeat of a trainer; absent before the first",
            ["trainer"],
        )
        self._alerts = self._gauge("ciuic_alerts", "Standing alerts", ["severity"])
        self._alert = self._gauge("ciuic_alert", "1 for each standing alert", ["key", "severity", "root"])
        self._interval = self._gauge("ciuic_interval_seconds", "Time between scheduled snapshots")
        self._undo_limit = self._gauge(
            "ciuic_undo_limit_bytes", "Undo log at which the oldest uncaptured snapshot of a root is given up"
        )
        self._version = self._gauge("ciuic_info", "Version of the daemon", ["version"])

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(name, text, labels or [], registry=self._registry)

    def text(self, status: StatusDocument) -> bytes:
        """Return all metrics as of `status`."""
        # A root that is no longer protected must not keep its last figures.
        for gauge in (
            self._mounted,
            self._last_of_root,
            self._age_of_root,
            self._good,
            *self._roots.values(),
        ):
            gauge.clear()
        self._interval.set(status.interval_seconds)
        self._undo_limit.set(status.undo_limit_bytes)
        self._version.labels(status.version).set(1)
        for root in status.roots:
            self._set_root(root)
        for field, gauge in self._remotes.items():
            gauge.clear()
            for remote in status.remotes:
                gauge.labels(remote.name).set(getattr(remote, field))
        self._set_drills(status)
        self._pending.set(sum(state.state in ("pending", "capturing") for state in status.captures))
        # Captures run one at a time, so at most one has progress.
        running = [state.progress for state in status.captures if state.progress is not None]
        pace = running[0] if running else Progress()
        self._share.set(pace.share)
        self._others.set(pace.others_waiting)
        self._writing.set(pace.others_writing)
        self._paused.set(pace.paused_seconds)
        if status.last_snapshot is not None:
            self._last.set(datetime.fromisoformat(status.last_snapshot.time).timestamp())
        self._stored.set(status.repository.size_bytes)
        self._free.set(status.repository.free_bytes)
        self._reserve.set(status.repository.reserve_bytes)
        self._growth.set(status.repository.growth_bytes_per_day)
        self._full.clear()
        if status.repository.full_in_seconds is not None:
            self._full.labels(status.repository.path).set(status.repository.full_in_seconds)
        self._count.set(status.repository.snapshots)
        self._damaged.set(0 if status.damage is None else status.damage.places)
        for severity in ("problem", "warning"):
            self._alerts.labels(severity).set(sum(alert.severity == severity for alert in status.alerts))
        self._alert.clear()
        for alert in status.alerts:
            self._alert.labels(alert.key, alert.severity, alert.root).set(1)
        self._set_trainers(status)
        return generate_latest(self._registry)

    def _set_drills(self, status: StatusDocument) -> None:
        own = status.drill or DrillStatus()
        self._own_drill.set(datetime.fromisoformat(own.time).timestamp() if own.time else 0)
        self._own_drill_ok.set(own.verdict == "good")
        self._own_drill_every.set(own.interval_seconds)
        for gauge in (self._drill, self._drill_ok):
            gauge.clear()
        for remote in status.remotes:
            if remote.last_drill:
                ended = datetime.fromisoformat(remote.last_drill).timestamp()
                self._drill.labels(remote.name).set(ended)
                self._drill_ok.labels(remote.name).set(remote.drill_ok)

    def _set_trainers(self, status: StatusDocument) -> None:
        for gauge in (self._steps, self._beats):
            gauge.clear()
        for trainer in status.trainers:
            self._steps.labels(trainer.name).set(trainer.step)
            if trainer.last_beat:
                beat = datetime.fromisoformat(trainer.last_beat).timestamp()
                self._beats.labels(trainer.name).set(beat)
        for state in ("running", "hung", "closed", "absent"):
            self._trainers.labels(state).set(sum(trainer.state == state for trainer in status.trainers))

    async def follow(self, events: EventBus) -> None:
        """Count events of the daemon, until cancelled."""
        with events.subscribe() as subscription:
            async for event in subscription.events():
                self._count_one(event)

    def _count_one(self, event: Event) -> None:
        if event.incident is not None:
            self.incidents.labels(event.incident.kind).inc()
        if event.snapshot is None:
            return
        if event.kind == "snapshot_cut":
            self.hold_seconds.observe(event.snapshot.hold_microseconds / 1e6)
        elif event.kind in ("snapshot_committed", "snapshot_failed"):
            self.snapshots.labels(event.kind.removeprefix("snapshot_")).inc()
            self.new_bytes.inc(event.snapshot.new_bytes)

    def _set_root(self, root: RootStatus) -> None:
        self._mounted.labels(root.path).set(root.state == "mounted")
        for field, gauge in self._roots.items():
            gauge.labels(root.path).set(getattr(root, field))
        if root.seconds_since_last is not None:
            self._age_of_root.labels(root.path).set(root.seconds_since_last)
        if root.seconds_since_good is not None:
            self._good.labels(root.path).set(root.seconds_since_good)
        if root.last_snapshot is not None:
            cut = datetime.fromisoformat(root.last_snapshot.time)
            self._last_of_root.labels(root.path).set(cut.timestamp())


async def keep_metrics_file(
    path: Path, is_wanted: Callable[[], bool], text: Callable[[], Awaitable[bytes]]
) -> None:
    """Replace the file of the metrics every `WRITE_SECONDS`, until cancelled; then remove it.

    Args:
        path: the file (`ciuic.protocol.metrics_file`).
        is_wanted: returns whether an exporter is configured; while none is, there is no file.
        text: returns the metrics in Prometheus text format.
    """
    is_failing = False
    try:
        while True:
            try:
                if is_wanted():
                    # In this thread: a file of some kilobytes, on tmpfs.
                    write_metrics(path, await text())
                else:
                    _remove(path)
                is_failing = False
            except Exception:  # nothing of the metrics may end the daemon
                # Once, not every ten seconds.
                if not is_failing:
                    log.exception("metrics_not_written", path=str(path))
                is_failing = True
            await trio.sleep(WRITE_SECONDS)
    finally:
        # The exporter answers `ciuic_up 0` at once.
        with suppress(OSError):
            _remove(path)


def _remove(path: Path) -> None:
    # In the thread of the caller: the file is on tmpfs.
    path.unlink(missing_ok=True)
