"""The daemon: sets its process up, starts and stops its parts in order, and carries out the control API's operations.

Order of start: the one-daemon lock, the control socket, orphans of a predecessor, the roots (first attempt of
each), the repository, the snapshots that a predecessor had promised, the schedule; then READY. Order of a
clean stop: no new work, the running capture ended and its epochs given back, roots unmounted, socket removed.

Guarantees: a clean stop leaves no mount, socket or process of ciuic behind, except a worker that still serves
handles that a job has open. A crash leaves the workers serving, and the next daemon adopts them.

A reload (SIGHUP, POST /v1/reload) takes up a changed configuration. One that is not valid changes nothing; a
root that is gone from it is unmounted before the call returns. `_apply_configuration` waits for no mount, so
that a signal after SIGHUP is not delayed by a root that hangs; `_await_mounted` does.

The control API (architecture.md, section 8): requests become calls, values and errors become JSON.

Guarantees: a body is decoded against its type, and unknown fields in it are refused; every CiuicError becomes its document and a
fitting status, in one place; nothing else leaks but "internal error" (the log has the rest). Leaves the work to ``Operations``
(service.py), and HTTP to `ciuic.protocol.http_server`, on a socket that runtime.py has bound.

The mode and group of the socket admit root and the members of `control.group`, who are administrators (runtime.py). Removing the
socket file is left to the daemon that created it.

Over a restart by systemd the roots stay mounted and their workers serve on. It sends a service SIGTERM for a stop
and for a restart alike; only the job that it carries out says which (org.freedesktop.systemd1.Job, type
"restart"). systemd is asked through systemctl (`is_restarting`), with a timeout; without an answer the daemon stops and unmounts.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qs

import msgspec
import structlog
import trio

import ciuic
from ciuic import __version__
from ciuic.config import Config, check_owners, load_config, raise_for
from ciuic.daemon.base.events import EventBus
from ciuic.daemon.base.metrics import keep_metrics_file
from ciuic.daemon.base.process_priority import slice_prefix
from ciuic.daemon.base.repository_store import LastSnapshot, Store, summary
from ciuic.daemon.base.runtime import bind_control_socket
from ciuic.daemon.drills import next_drill_ns
from ciuic.daemon.housekeeping import DaemonHousekeeping, tell_damage
from ciuic.daemon.parts import DaemonParts
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.capture_process import end_orphaned_captures
from ciuic.daemon.snapshots.requests import find_state
from ciuic.daemon.snapshots.schedule import last_cut_ns
from ciuic.daemon.snapshots.space_watch import SpaceWatch
from ciuic.errors import CiuicError, NotFound, NotPermitted, UsageError
from ciuic.protocol.control_types import (
    BesideStatus,
    DamageStatus,
    DrillStatus,
    ErrorDocument,
    FlushReport,
    FlushRequest,
    ForgetRequest,
    HoldDecision,
    HoldRequest,
    HoldState,
    Index,
    MountState,
    PruneReport,
    PruneRequest,
    ReloadReport,
    RemoteStatus,
    RepositoryStatus,
    Resource,
    RootChange,
    RootRequest,
    RootStatus,
    SnapshotRequest,
    SnapshotState,
    StatusDocument,
    rfc3339,
)
from ciuic.protocol.http_server import Reply, Request, document, refusal, serve_http
from ciuic.protocol.known_damage import damage_status, read_damage
from ciuic.protocol.last_drill import LastDrill, drill_status, read_drills, standing_drill
from ciuic.protocol.metrics_file import METRICS_NAME
from ciuic.protocol.stored_remotely import RemotePlace
from ciuic.structs import decode_json
from ciuic.system import logs
from ciuic.system.child_process import find_program, program_environment
from ciuic.system.io_throttle import audible, waits_files
from ciuic.system.sd_daemon import Notifier, take_stored_fds
from ciuic.system.service_manager import unit_of

# The workers serve meanwhile, so the wait costs no job anything.
_QUESTION_SECONDS = 3.0
log = structlog.get_logger(__name__)


async def is_restarting(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether systemd is carrying out a restart of the unit that this process belongs to."""
    if "INVOCATION_ID" not in environment:
        return False
    # Untranslated, because a carriage return is allowed in the name of a control group.
    with open("/proc/self/cgroup", errors="replace", newline="\n") as file:  # noqa: ASYNC230  no disk
        unit = unit_of(file.read())
    if unit is None:
        return False
    command = [find_program("systemctl"), "list-jobs", "--no-legend", "--plain", unit]
    try:
        with trio.fail_after(_QUESTION_SECONDS):
            answer = await trio.run_process(
                command, capture_stdout=True, stderr=subprocess.DEVNULL, cwd="/", env=program_environment()
            )
    except (OSError, subprocess.CalledProcessError, trio.TooSlowError) as error:
        log.warning("service_manager_not_asked", error=str(error) or type(error).__name__)
        return False
    return _job_type(answer.stdout.decode(errors="replace"), unit) in ("restart", "try-restart")


def _job_type(listing: str, unit: str) -> str:
    """Return the type of the unit's job in the output of `systemctl list-jobs`; empty without a job."""
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) >= 3 and fields[1] == unit:
            return fields[2]
    return ""


_T = TypeVar("_T")


class Operations(Protocol):
    """Operations that the API offers. A method raises CiuicError with a message for the caller."""

    events: EventBus

    async def status(self) -> StatusDocument:
        """Return the status document."""

    async def take_snapshot(self, request: SnapshotRequest) -> SnapshotState:
        """Cut a snapshot, and return its state when the id is final."""

    async def snapshot_state(self, snapshot_id: str, *, wait: bool) -> SnapshotState:
        """Return the state of a snapshot; with `wait`, when it is committed or has failed."""

    async def flush(self, roots: Sequence[str]) -> FlushReport:
        """Write back what the kernel has cached of these roots; of all for none."""

    async def hold(self, request: HoldRequest) -> HoldState:
        """Hold the roots of a snapshot, and return when all are held."""

    async def decide_hold(self, token: str, *, cut: bool) -> SnapshotState | None:
        """Cut what is held, and return the state when the id is final; or release it."""

    async def add_root(self, path: str) -> RootStatus:
        """Mount a root that the configuration has, and return its status."""

    async def remove_root(self, path: str) -> None:
        """Unmount a root."""

    async def prune(self, *, dry_run: bool) -> PruneReport:
        """Apply retention and free space now."""

    async def forget_trainer(self, trainer: str) -> None:
        """Stop watching a trainer, by name or pid."""

    async def reload(self) -> ReloadReport:
        """Take up the changed configuration."""

    def request_stop(self) -> None:
        """Stop the daemon. Returns at once."""

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus text format."""


class Api:
    """The resources of the daemon. `answer` raises nothing but cancellation."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._routes: Final[dict[tuple[str, str], Callable[[Request], Awaitable[Reply]]]] = {
            ("GET", "/"): self._index,
            ("GET", "/v1"): self._index,
            ("GET", "/v1/status"): self._status,
            ("POST", "/v1/snapshots"): self._take_snapshot,
            ("GET", "/v1/snapshots/{id}"): self._snapshot_state,
            ("POST", "/v1/flush"): self._flush,
            ("POST", "/v1/holds"): self._hold,
            ("POST", "/v1/holds/{id}"): self._decide_hold,
            ("POST", "/v1/roots"): self._add_root,
            ("DELETE", "/v1/roots"): self._remove_root,
            ("DELETE", "/v1/trainers"): self._forget_trainer,
            ("POST", "/v1/prune"): self._prune,
            ("POST", "/v1/reload"): self._reload,
            ("POST", "/v1/stop"): self._stop,
            ("GET", "/v1/events"): self._events,
            ("GET", "/metrics"): self._metrics,
        }

    async def answer(self, request: Request) -> Reply:
        """Carry out a request. Errors become documents here and nowhere else."""
        method = "GET" if request.method == "HEAD" else request.method
        above, _, last = request.path.rpartition("/")
        pattern = f"{above}/{{id}}" if last and above in ("/v1/snapshots", "/v1/holds") else request.path
        handler = self._routes.get((method, pattern))
        if handler is None:
            known = any(path == pattern for _, path in self._routes)
            return _not_allowed(request) if known else _not_found(request)
        try:
            return await handler(request)
        except CiuicError as error:
            return refusal(error)
        except Exception:
            log.exception("request_failed", method=request.method, path=request.path)
            return refusal(CiuicError("internal error in the daemon", hint="its log has the details"))

    async def _index(self, request: Request) -> Reply:
        """Answer with the version and the resources of this daemon, for operators and other versions."""
        resources = [Resource(method=method, path=path) for method, path in self._routes]
        return document(Index(version=__version__, resources=resources))

    async def _status(self, request: Request) -> Reply:
        return document(await self._operations.status())

    async def _take_snapshot(self, request: Request) -> Reply:
        wanted = _decode(request, SnapshotRequest)
        state = await self._operations.take_snapshot(wanted)
        if not wanted.wait:
            return document(state, 202)
        return document(await self._operations.snapshot_state(state.id, wait=True))

    async def _snapshot_state(self, request: Request) -> Reply:
        wait = parse_qs(request.query).get("wait", ["0"])[-1] != "0"
        snapshot_id = request.path.rpartition("/")[2]
        return document(await self._operations.snapshot_state(snapshot_id, wait=wait))

    async def _flush(self, request: Request) -> Reply:
        return document(await self._operations.flush(_decode(request, FlushRequest).roots))

    async def _hold(self, request: Request) -> Reply:
        return document(await self._operations.hold(_decode(request, HoldRequest)))

    async def _decide_hold(self, request: Request) -> Reply:
        token, wanted = request.path.rpartition("/")[2], _decode(request, HoldDecision)
        state = await self._operations.decide_hold(token, cut=wanted.cut)
        return document({}) if state is None else document(state, 202)

    async def _add_root(self, request: Request) -> Reply:
        return document(await self._operations.add_root(_decode(request, RootRequest).path))

    async def _remove_root(self, request: Request) -> Reply:
        await self._operations.remove_root(_decode(request, RootRequest).path)
        return document({})

    async def _forget_trainer(self, request: Request) -> Reply:
        await self._operations.forget_trainer(_decode(request, ForgetRequest).trainer)
        return document({})

    async def _prune(self, request: Request) -> Reply:
        return document(await self._operations.prune(dry_run=_decode(request, PruneRequest).dry_run))

    async def _reload(self, request: Request) -> Reply:
        return document(await self._operations.reload())

    async def _stop(self, request: Request) -> Reply:
        # Sets an event only, so that the answer goes out before the connections are closed.
        self._operations.request_stop()
        return document({}, 202)

    async def _metrics(self, request: Request) -> Reply:
        text = await self._operations.metrics()
        return Reply(200, text, "text/plain; version=0.0.4; charset=utf-8")

    async def _events(self, request: Request) -> Reply:
        lines = _event_lines(self._operations.events)
        return Reply(200, media_type="text/event-stream; charset=utf-8", lines=lines)


async def _event_lines(bus: EventBus) -> AsyncGenerator[bytes, None]:
    with bus.subscribe() as subscription:
        yield b": listening\n\n"  # a listener misses no event after this line
        async with aclosing(subscription.events()) as events:
            async for event in events:
                yield b"data:" + msgspec.json.encode(event) + b"\n\n"


def _decode(request: Request, kind: type[_T]) -> _T:
    try:
        # No body is a request in which no field is set, as `curl -X POST` sends it.
        return decode_json(request.body or b"{}", kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"the request cannot be read: {error}") from error


def _not_found(request: Request) -> Reply:
    body = ErrorDocument(
        error=f"no such resource: {request.path}",
        hint=f"GET / lists the resources of this daemon, which is version {__version__}; a command of another version"
        " may ask for others",
        code=2,
    )
    return document(body, 404)


def _not_allowed(request: Request) -> Reply:
    return document(ErrorDocument(error=f"{request.method} is not possible on {request.path}", code=2), 405)


_SHOWN_INCIDENTS = 20


async def status_document(parts: DaemonParts) -> StatusDocument:
    """Return the status document.

    All workers and the store are asked at once; one that does not answer is shown as such.
    """
    supervisors = dict(parts.roots.supervisors)
    # The control socket answers before the daemon has looked at its roots, and a root that is missing here
    # would look unprotected.
    roots = {
        root.path: RootStatus(path=root.path, driver=root.driver, state="starting")
        for root in parts.settings.roots
        if root.path not in supervisors
    }
    protected = [*supervisors, *roots]
    supervisors = {**parts.roots.departing, **supervisors}
    paths = list(dict.fromkeys([*protected, *supervisors]))

    async def ask(path: str) -> None:
        roots[path] = await supervisors[path].status()

    async with trio.open_nursery() as nursery:
        for path in supervisors:
            nursery.start_soon(ask, path)
        now_ns = parts.now_ns()
        remotes = parts.settings.remotes
        facts = await trio.to_thread.run_sync(_ask_store, parts.store, parts.space, paths, remotes, now_ns)
    parts.forecast.apply(facts.repository)
    # Also at each look of the housekeeping, half a minute apart.
    tell_damage(parts.alerts, facts.damage)
    parts.ages.note(facts.by_root, is_readable=facts.is_readable)
    now_ns = parts.now_ns()
    due = parts.schedule.next_due()
    next_snapshot = due.astimezone().isoformat(timespec="seconds") if due is not None else None
    for path, root in roots.items():
        newest = facts.by_root[path]
        root.last_snapshot = summary(newest) if newest is not None else None
        root.seconds_since_last = parts.ages.seconds(path)
        root.seconds_since_good = parts.good_checkpoints.seconds(path)
        if path in protected:
            root.next_snapshot = rfc3339(now_ns) if path in parts.first_snapshots.waiting else next_snapshot
    return StatusDocument(
        version=ciuic.__version__,
        pid=os.getpid(),
        since=rfc3339(parts.started_ns),
        now=rfc3339(now_ns),
        roots=[roots[path] for path in paths],
        repository=facts.repository,
        remotes=facts.remotes,
        drill=_drill(parts, facts.drills, now_ns),
        damage=facts.damage,
        last_snapshot=summary(facts.newest) if facts.newest is not None else None,
        next_snapshot=next_snapshot,
        seconds_since_last=_risk_seconds(
            [roots[path] for path in protected], _age_seconds(facts.newest, now_ns)
        ),
        interval_seconds=parts.settings.interval_seconds,
        undo_limit_bytes=parts.settings.undo_limit_bytes,
        captures=parts.snapshots.unfinished(),
        beside=_beside(parts),
        alerts=parts.alerts.standing(),
        trainers=parts.watch.statuses(),
        incidents=parts.watch.incidents()[:_SHOWN_INCIDENTS],
        stopping=parts.stopping,
        config_path=parts.settings.config_path,
    )


def _drill(parts: DaemonParts, drills: Sequence[LastDrill], now_ns: int) -> DrillStatus | None:
    """Return the last drill and when the next is due; None if there was none and none is due."""
    every_seconds = parts.settings.drill_every_seconds
    if not drills and not every_seconds:
        return None
    standing = standing_drill(drills)
    found = DrillStatus() if standing is None else drill_status(standing)
    if every_seconds:
        found.interval_seconds = every_seconds
        found.next = rfc3339(next_drill_ns(drills, every_seconds, now_ns))
    return found


def _beside(parts: DaemonParts) -> BesideStatus:
    settings = parts.settings
    return BesideStatus(
        io_priority=settings.io_priority,
        slice=parts.slice,
        min_share=settings.min_share,
        finish_within_seconds=settings.finish_within_seconds,
        hears=audible(waits_files(str(settings.runtime_dir))),
    )


class _StoreFacts(NamedTuple):
    """The part of the status that the repository knows."""

    repository: RepositoryStatus
    newest: LastSnapshot | None
    by_root: Mapping[str, LastSnapshot | None]
    remotes: list[RemoteStatus]
    drills: list[LastDrill]
    damage: DamageStatus | None
    is_readable: bool


def _ask_store(
    store: Store, space: SpaceWatch, roots: Sequence[str], remotes: Sequence[RemotePlace], now_ns: int
) -> _StoreFacts:
    # Every root has an entry, also where the repository cannot be read.
    by_root: dict[str, LastSnapshot | None] = dict.fromkeys(roots)
    lags: list[RemoteStatus] = []
    is_readable = True
    try:
        newest = store.latest() if store.path is not None else None
        by_root = store.latest_of(roots)
        lags = store.remotes(remotes, now_ns=now_ns)
    except CiuicError as error:
        log.warning("store_unreadable", error=str(error))
        newest, is_readable = None, False
    drills = [] if store.path is None else read_drills(store.path)
    damage = None if store.path is None else damage_status(read_damage(store.path))
    repository = space.measure()
    return _StoreFacts(repository, newest, by_root, lags, drills, damage, is_readable and repository.exists)


def _age_seconds(snapshot: LastSnapshot | None, now_ns: int) -> float | None:
    """Return the age of a snapshot; 0 for a cut in the future (the clock was put back)."""
    return None if snapshot is None else max(0.0, (now_ns - snapshot.time_ns) / 1e9)


def _risk_seconds(roots: Sequence[RootStatus], without_roots: float | None) -> float | None:
    """Return the age of the newest snapshot of the root that is longest without one."""
    if not roots:
        return without_roots
    ages = [root.seconds_since_last for root in roots if root.seconds_since_last is not None]
    return max(ages) if len(ages) == len(roots) else None


# Settings that change at a restart only, because workers and commands find the daemon by them, and their
# configuration keys.
_AT_RESTART: Final = {"socket": "control.socket", "runtime_dir": "daemon.runtime_dir"}
_CONTROL_FD_NAME = "control"


class _AppliedConfiguration(NamedTuple):
    """Outcome of a reload; the roots in `started` may not be mounted yet."""

    report: ReloadReport
    started: list[RootSupervisor]


async def _apply_configuration(parts: DaemonParts) -> _AppliedConfiguration:
    """Read the configuration again and apply it.

    Raises:
        ConfigError: the configuration is not valid; nothing was changed.
        Unreachable: the daemon is stopping.
    """
    parts.refuse_when_stopping()
    before = parts.settings
    wanted = await trio.to_thread.run_sync(parts.active.read)
    parts.take_over(wanted)
    report = ReloadReport(
        config_path=wanted.config_path,
        at_restart=[
            key for field, key in _AT_RESTART.items() if getattr(before, field) != getattr(wanted, field)
        ],
    )
    # A list of its own: `remove` changes the dictionary.
    for path in [path for path in parts.roots.supervisors if parts.settings.root(path) is None]:
        await parts.roots.remove(path)
        state: MountState = "stopping" if path in parts.roots.departing else "unmounted"
        report.changes.append(RootChange(path=path, change="removed", state=state))
    known = set(parts.roots.supervisors)
    supervisors = [parts.roots.change_or_start(root) for root in parts.settings.roots]
    for supervisor in supervisors:
        if supervisor.path not in known:
            parts.first_snapshots.wanted(supervisor.path)
    # After the roots: the first one decides where the repository is, and mounted ones know where it was.
    await parts.roots.prepare_store()
    if before.interval_seconds != parts.settings.interval_seconds:
        parts.schedule.change_interval(parts.settings.interval_seconds)
    parts.priorities.wake()  # the running capture goes on under the new deadline and share
    # At once, because the next regular look-up may be a minute away.
    await parts.accounts.refresh()
    await parts.roots.let_go_of_unclaimed()
    parts.owed.retry()
    log.info("configuration_reloaded", file=parts.settings.config_path)
    return _AppliedConfiguration(
        report, [supervisor for supervisor in supervisors if supervisor.path not in known]
    )


async def _await_mounted(applied: _AppliedConfiguration) -> ReloadReport:
    """Wait until every added root is mounted or its first attempt has failed, and report how each ended."""
    report, started = applied
    for supervisor in started:
        await supervisor.settled()
        await supervisor.not_in_transition()
        report.changes.append(
            RootChange(
                path=supervisor.path, change="added", state=supervisor.state, error=supervisor.error or ""
            )
        )
    return report


class Daemon:
    """The daemon: `main` runs it from start to stop; the other public methods are operations of the control API."""

    def __init__(
        self,
        config: Config,
        *,
        load: Callable[[], Config],
        notifier: Notifier,
        now_ns: Callable[[], int],
        stored_fds: dict[str, int] | None = None,
        command_prefix: Sequence[str] = (),
        worker_service: str = "",
    ) -> None:
        """Make the parts; nothing is started yet.

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
        self._stored_fds = stored_fds or {}
        self.parts = DaemonParts(
            config,
            load=load,
            notifier=notifier,
            now_ns=now_ns,
            stored_fds=self._stored_fds,
            command_prefix=command_prefix,
            worker_service=worker_service,
        )
        self.events = self.parts.events
        self._stop = trio.Event()
        self._served = trio.Event()

    async def main(self) -> None:
        """Run from start to clean stop.

        Raises:
            CiuicError: another daemon runs, or the control socket or the configured group cannot be had.
        """
        parts = self.parts
        # First: only the owner of the lock may replace sockets, end captures and detach mounts.
        parts.runtime.acquire()
        try:
            await parts.accounts.start()
            listener = bind_control_socket(
                parts.settings.socket,
                parts.accounts.group_id,
                self._stored_fds.pop(_CONTROL_FD_NAME, None),
            )
        except BaseException:
            parts.runtime.release(keep_pending=True, keep_untrusted=True)  # a killed predecessor's
            raise
        parts.notifier.store(_CONTROL_FD_NAME, listener.fileno())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_signals)
            nursery.start_soon(self._feed_watchdog)
            nursery.start_soon(parts.metrics_registry.follow, parts.events)
            nursery.start_soon(parts.ages.follow, parts.events)
            nursery.start_soon(
                keep_metrics_file,
                parts.runtime.path / METRICS_NAME,
                lambda: parts.settings.exports_metrics,
                self.metrics,
            )
            nursery.start_soon(parts.accounts.run)
            nursery.start_soon(parts.watch.tell)
            await nursery.start(serve_http, Api(self), listener, self._served.wait, parts.accounts.revoked)
            await nursery.start(parts.pairing.serve, self._served.wait)
            working = trio.CancelScope()
            nursery.start_soon(self._work, nursery, working)
            await self._stop.wait()
            await self._shut_down(working)
            nursery.cancel_scope.cancel()
        parts.settings.socket.unlink(missing_ok=True)
        parts.notifier.unstore(_CONTROL_FD_NAME)
        goes_on = parts.snapshots.capturing.leaving or not parts.roots.begun
        # A root that is unmounted needs no mark: mounted anew, it is compared in full anyway.
        parts.runtime.release(keep_pending=goes_on, keep_untrusted=parts.roots.any_left_mounted)
        log.info("daemon_stopped")

    async def _work(self, nursery: trio.Nursery, working: trio.CancelScope) -> None:
        """Bring everything up and keep it running until `working` is cancelled."""
        parts = self.parts
        with working:
            await trio.to_thread.run_sync(parts.captures.prepare)
            records = await trio.to_thread.run_sync(parts.runtime.read_pending)
            # Before captures and roots: a keeper may have started a worker for one of them just now.
            await self._inherit_sessions()
            await end_orphaned_captures(records, parts.runtime)
            for root in parts.settings.roots:
                parts.roots.start(root, nursery)
            parts.roots.nursery = nursery
            await parts.roots.let_go_of_unclaimed()
            await parts.roots.settled()
            await parts.sessions.close_rest([*parts.roots.supervisors, *parts.roots.departing])
            # After the roots are mounted: their backing directories remember where the repository was.
            await parts.roots.prepare_store()
            parts.snapshots.capturing.trust.take_over(
                await trio.to_thread.run_sync(parts.runtime.read_untrusted)
            )
            await parts.snapshots.resume(records)
            parts.roots.reconcile_new_sessions = True
            for supervisor in list(parts.roots.supervisors.values()):  # a reload may add roots meanwhile
                if supervisor.worker is not None:
                    await parts.snapshots.reconcile(supervisor.path, supervisor.worker)
            paths = [root.path for root in parts.settings.roots]
            parts.schedule.start(await trio.to_thread.run_sync(last_cut_ns, parts.store, paths))
            housekeeping = DaemonHousekeeping(parts)
            parts.notifier.ready(housekeeping.status_line())
            log.info("daemon_ready", roots=list(parts.roots.supervisors), pid=os.getpid())
            async with trio.open_nursery() as workers:
                workers.start_soon(parts.sessions.run)
                workers.start_soon(parts.priorities.run)
                workers.start_soon(parts.snapshots.capturing.run)
                workers.start_soon(parts.held_snapshots.run)
                workers.start_soon(parts.upkeep.run)
                workers.start_soon(parts.drills.run)
                workers.start_soon(parts.verdicts.run)
                workers.start_soon(parts.scheduled.run)
                workers.start_soon(parts.first_snapshots.run)
                workers.start_soon(parts.owed.run)
                workers.start_soon(parts.event_snapshots.run)
                workers.start_soon(housekeeping.run)
                workers.start_soon(parts.watch.run)
                workers.start_soon(parts.numbers.run)
                workers.start_soon(parts.preemption.run)

    async def _inherit_sessions(self) -> None:
        """Take over sessions of predecessors."""
        roots = self.parts.settings.roots
        serves_itself = any(root.driver != "pyfuse3" for root in roots)
        paths = [root.path for root in roots] + await trio.to_thread.run_sync(self.parts.roots.unclaimed)
        await self.parts.sessions.inherit(paths, prepare=serves_itself)

    async def _shut_down(self, working: trio.CancelScope) -> None:
        parts = self.parts
        parts.stopping = True
        log.info("daemon_stopping")
        leaving = await is_restarting()
        parts.notifier.stopping(
            f"stopping: giving back what is not captured, {'leaving' if leaving else 'unmounting'}"
        )
        parts.schedule.stop()
        parts.snapshots.capturing.leaving = leaving
        working.cancel()
        await parts.snapshots.capturing.stopped()
        await (parts.roots.leave_all() if leaving else parts.roots.stop_all())
        await trio.to_thread.run_sync(partial(parts.roots.close, leaving=leaving))
        parts.watch.stopped(followed=leaving)
        await trio.to_thread.run_sync(parts.captures.close)
        parts.events.close()
        self._served.set()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    await self._reload_quietly()
                else:
                    log.info("stop_requested", signal=signal.Signals(number).name)
                    self.request_stop()

    async def _feed_watchdog(self) -> None:
        """Feed systemd's watchdog from the event loop itself, so that systemd learns when the loop hangs."""
        if self.parts.notifier.watchdog_seconds is None:
            return
        while True:
            self.parts.notifier.watchdog()
            # A third of the limit, so that one late round does not end the service.
            await trio.sleep(self.parts.notifier.watchdog_seconds / 3)

    async def _reload_quietly(self) -> None:
        try:
            await _apply_configuration(self.parts)
        except CiuicError as error:
            log.error("reload_refused", error=str(error))

    # -- what the control API asks for

    async def status(self) -> StatusDocument:
        """Return the status document."""
        return await status_document(self.parts)

    async def metrics(self) -> bytes:
        return self.parts.metrics_registry.text(await self.status())

    async def take_snapshot(self, request: SnapshotRequest) -> SnapshotState:
        self.parts.refuse_when_stopping()
        if request.before_end_seconds:
            return (await self.parts.preemption.end(request)).state
        return (await self.parts.snapshots.take(request)).state

    async def snapshot_state(self, snapshot_id: str, *, wait: bool) -> SnapshotState:
        return await find_state(self.parts.snapshots, self.parts.store, snapshot_id, wait=wait)

    async def flush(self, roots: Sequence[str]) -> FlushReport:
        self.parts.refuse_when_stopping()
        return FlushReport(complete=await self.parts.snapshots.flush(roots))

    async def hold(self, request: HoldRequest) -> HoldState:
        self.parts.refuse_when_stopping()
        return await self.parts.held_snapshots.hold(request)

    async def decide_hold(self, token: str, *, cut: bool) -> SnapshotState | None:
        return await self.parts.held_snapshots.decide(token, cut=cut)

    async def add_root(self, path: str) -> RootStatus:
        parts = self.parts
        parts.refuse_when_stopping()
        parts.take_over(await trio.to_thread.run_sync(parts.active.read))
        settings = parts.settings.root(path)
        if settings is None:
            raise NotFound(
                f"{path} is not in the configuration {parts.settings.config_path}",
                hint=f"ciuic protect {path}",
            )
        new = path not in parts.roots.supervisors
        try:
            status = await parts.roots.add(settings)
        finally:
            if new:
                parts.first_snapshots.wanted(path)  # also when the root is mounted only later
        await parts.roots.prepare_store()
        return status

    async def remove_root(self, path: str) -> None:
        await self.parts.unprotect(path)

    async def prune(self, *, dry_run: bool) -> PruneReport:
        self.parts.refuse_when_stopping()
        return await self.parts.upkeep.prune(dry_run=dry_run)

    async def forget_trainer(self, trainer: str) -> None:
        self.parts.watch.forget(trainer)

    async def reload(self) -> ReloadReport:
        """Take up a changed configuration; raise ConfigError and change nothing when it is not valid."""
        return await _await_mounted(await _apply_configuration(self.parts))

    def request_stop(self) -> None:
        self._stop.set()


# Out-of-memory score: below the job's, so that the kernel kills others first, and above a worker's, which the
# job needs at once.
_OOM_SCORE_ADJ = "-500"
# Environment variable that ciuic.service sets: path of the socket of ciuic-workers.service.
WORKER_SERVICE = "CIUIC_WORKER_SERVICE"


def run_daemon(config: Config, *, reload: Callable[[], Config] | None = None) -> int:
    """Run the daemon; see `ciuic.daemon.run`."""
    if os.geteuid() != 0:
        raise NotPermitted("the daemon mounts file systems and must run as root", hint="sudo ciuic daemon")
    raise_for(check_owners(config))
    as_json = {"json": True, "text": False}.get(config.log.format)
    # Every caller of the control socket takes a descriptor, and callers must not keep captures from starting.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    with suppress(OSError):  # without CAP_SYS_RESOURCE; the systemd unit sets the same value
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    logs.configure(verbose=config.log.level == "debug", as_json=as_json)
    stored_fds = take_stored_fds(os.environ, os.getpid())
    notifier = Notifier.from_environment(os.environ, os.getpid())
    load = reload or (lambda: load_config(config.file))
    try:
        daemon = Daemon(
            config,
            load=load,
            notifier=notifier,
            now_ns=time.time_ns,
            stored_fds=stored_fds,
            command_prefix=slice_prefix(os.environ),
            worker_service=os.environ.get(WORKER_SERVICE, ""),
        )
        trio.run(daemon.main, strict_exception_groups=True)
    except BaseExceptionGroup as group:
        refused = _only(group)
        if refused is not None:
            raise refused from None
        raise
    finally:
        notifier.close()
    return 0


def _only(group: BaseExceptionGroup[BaseException]) -> CiuicError | None:
    """Return the CiuicError that a nursery wrapped; None where the group holds anything else."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return found if isinstance(found, CiuicError) else None


if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup
