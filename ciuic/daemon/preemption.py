"""The end of this machine, of which its cloud or a scheduler gives notice: one urgent snapshot, and an upload that knows the deadline.

On a notice the alert `preemption` begins, the process that uploads is told of the deadline (`ciuic.remote.upload_deadline`), and then
all roots are cut; in the last hour captures make way for nobody. Metadata services are asked by a process
(`ciuic.daemon.jobs`), and only where `[preemption] clouds` names them.

Guarantees: no notice holds up the event loop; a notice that is repeated, or has a later end than one that stands, cuts nothing, and
notices cut at most one snapshot in `_LEAST_BETWEEN_SECONDS`. A snapshot that fails is tried again, and an upload that starts later is told,
until the end. A daemon that is killed between the note for the upload and the cut has a
successor that is told of the notice by the service again. A notice that is taken back ends alert and deadline.
Belongs to the trio thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from ciuic.config import PreemptionConfig
from ciuic.daemon.base.events import Alerts, EventBus, repeat
from ciuic.daemon.base.job_process import job_process
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.jobs import NoticeJob, NoticeLine, job_command
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError
from ciuic.printable import one_line
from ciuic.protocol.control_types import SnapshotRequest
from ciuic.protocol.stored_remotely import upload_state_dir
from ciuic.remote.upload_deadline import announce, withdraw
from ciuic.structs import decode_json
from ciuic.system.child_process import environment, find_program
from ciuic.system.cloud_notices import MetadataService
from ciuic.units import human_duration

TAG_BEFORE_PREEMPTION: Final = "before-preemption"
"""Tag of these snapshots."""
KEY_PREEMPTION: Final = "preemption"
_KEY_SERVICE: Final = "metadata"
_BY_REQUEST: Final = "request"
_PERIOD_SECONDS: Final = 1.0
# A process that ends at once, as where Python cannot be started, is not started again and again.
_RESTART_SECONDS: Final = 30.0
# A service that names another event each time must not cut a snapshot each time.
_LEAST_BETWEEN_SECONDS: Final = 30.0
_AGAIN_SECONDS: Final = 5.0
"""Time from a snapshot that failed to the next try, twice as long each time."""
_MAX_AGAIN_SECONDS: Final = 300.0
# A mistaken or hostile end that is days away must not let captures go before the jobs until then.
_MAX_URGENT_SECONDS: Final = 3600.0
# The state directory of the upload may be on a disk that hangs, and the cut must not wait for it.
_ANNOUNCE_SECONDS: Final = 2.0
_MAX_STANDING: Final = 128
_MAX_LINE_BYTES: Final = 1 << 16
_MAX_CAUSE_CHARACTERS: Final = 200
log = structlog.get_logger(__name__)


class _Notice(msgspec.Struct, frozen=True):
    cause: str
    by_seconds: float
    """The end, on the monotonic clock."""
    certain: bool = True


class Preemption:
    """Notices of the end of this machine, and their effects. `run` is its task."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        alerts: Alerts,
        events: EventBus,
        *,
        cwd: Path,
        as_service: bool,
        on_urgency: Callable[[], None],
    ) -> None:
        """Prepare to listen.

        Args:
            settings: settings in force.
            take: cuts a snapshot; raises CiuicError when none can be cut.
            alerts: where notices and troubles are reported.
            events: bus for the event stream.
            cwd: working directory of the process that asks.
            as_service: systemd-run is known to work, so that process is a service of its own: the daemon has no network.
            on_urgency: called when captures are to make way for nobody, or for others again.
        """
        self._settings = settings
        self._take = take
        self._alerts = alerts
        self._events = events
        self._cwd = cwd
        self._as_service = as_service
        self._on_urgency = on_urgency
        self._standing: dict[str, _Notice] = {}
        self._cut_at = -math.inf
        self._owed: SnapshotRequest | None = None
        """Snapshot that failed and is to be tried again."""
        self._again_seconds = _AGAIN_SECONDS
        self._is_untold = False
        """True if no upload was there that could be told of a notice."""

    @property
    def is_near(self) -> bool:
        """True within the last hour before the end that a standing notice names."""
        now = time.monotonic()
        return any(now < one.by_seconds <= now + _MAX_URGENT_SECONDS for one in self._standing.values())

    async def end(self, request: SnapshotRequest) -> PendingSnapshot:
        """Do on request what a notice leads to, and return when the instant of the snapshot is fixed.

        Args:
            request: what is asked for, with the time until the end.

        Raises:
            CiuicError: no root can be cut.
        """
        cause = one_line(request.cause)[:_MAX_CAUSE_CHARACTERS] or "the end of this machine was announced"
        notice = _Notice(cause, time.monotonic() + max(0.0, request.before_end_seconds))
        self._standing[_BY_REQUEST] = notice
        await self._announce(notice)
        return await self._cut(
            msgspec.structs.replace(
                request,
                message=request.message or cause,
                tags=list(dict.fromkeys([*request.tags, TAG_BEFORE_PREEMPTION])),
            )
        )

    async def run(self) -> None:
        """Listen to the services of the configuration until cancelled. Changes of the configuration take effect."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._expire)
            nursery.start_soon(
                repeat, self._make_up, _PERIOD_SECONDS, "preemption_not_made_up", _PERIOD_SECONDS
            )
            while True:
                config = self._settings().preemption
                if not config.clouds:
                    await self._forget_services()
                    await trio.sleep(_PERIOD_SECONDS)
                    continue
                try:
                    await self._listen(config)
                except Exception:
                    log.exception("notices_not_heard")  # a defect there must not end the service
                if self._settings().preemption == config:
                    await trio.sleep(_RESTART_SECONDS)

    async def _listen(self, config: PreemptionConfig) -> None:
        """Follow the process that asks, until it ends or the configuration changes."""
        services = tuple(
            MetadataService(cloud, config.endpoint or "", grace_seconds=config.grace_seconds)
            for cloud in config.clouds
        )
        async with (
            job_process(
                self._command(), NoticeJob(services=services), self._cwd, at_once=True, wait_seconds=1
            ) as running,
            trio.open_nursery() as nursery,
        ):

            async def end_when_changed() -> None:
                while self._settings().preemption == config:  # noqa: ASYNC110 - settings tell nobody of a change
                    await trio.sleep(_PERIOD_SECONDS)
                nursery.cancel_scope.cancel()

            nursery.start_soon(end_when_changed)
            rest = bytearray()
            async for part in running.stdout:
                rest += part
                while (end := rest.find(b"\n")) >= 0:
                    line = bytes(rest[:end])
                    del rest[: end + 1]
                    await self._hear(line)
                if len(rest) > _MAX_LINE_BYTES:
                    log.warning("notices_not_heard", error="a line of the process is too long")
                    break
            nursery.cancel_scope.cancel()

    def _command(self) -> list[str]:
        command = job_command("notices")
        if not self._as_service:
            return command
        return [
            find_program("systemd-run"),
            *("--pipe", "--wait", "--collect", "--quiet", "--service-type=exec"),
            *(
                f"--property={one}"
                for one in (
                    "DynamicUser=yes",
                    "CapabilityBoundingSet=",
                    "IPAddressDeny=any",
                    "IPAddressAllow=link-local localhost",
                    "RestrictAddressFamilies=AF_INET AF_INET6",
                )
            ),
            *(f"--setenv={name}={value}" for name, value in environment().items()),
            "--",
            # systemd expands variables in arguments (systemd.service(5), COMMAND LINES).
            *(word.replace("$", "$$") for word in command),
        ]

    async def _hear(self, line: bytes) -> None:
        try:
            said = decode_json(line, NoticeLine)
        except msgspec.DecodeError as error:
            log.warning("notices_not_heard", error=str(error))
            return
        text = one_line(said.text)[:_MAX_CAUSE_CHARACTERS]
        if said.kind == "problem":
            log.warning("metadata_service", error=text)
            self._alerts.report(
                _KEY_SERVICE,
                text,
                hint="[preemption] clouds names the clouds that are asked",
                severity="warning",
            )
            return
        self._alerts.clear(_KEY_SERVICE)
        if said.kind == "withdrawn":
            await self._withdraw(said.key)
        elif math.isfinite(said.seconds):
            await self._notified(said.key, text, said)

    async def _notified(self, key: str, cause: str, said: NoticeLine) -> None:
        now = time.monotonic()
        if len(self._standing) >= _MAX_STANDING and key not in self._standing:
            return
        notice = _Notice(cause, now + max(0.0, said.seconds), said.certain)
        earlier = [one for one in self._standing.values() if now < one.by_seconds <= notice.by_seconds]
        self._standing[key] = notice
        await self._announce(notice)
        if earlier or now - self._cut_at < _LEAST_BETWEEN_SECONDS:
            return
        self._again_seconds = _AGAIN_SECONDS
        await self._cut_unasked(SnapshotRequest(message=cause, tags=[TAG_BEFORE_PREEMPTION]))

    async def _cut_unasked(self, request: SnapshotRequest) -> None:
        self._owed = None
        try:
            await self._cut(request)
        except CiuicError as error:
            self._owed = request
            log.error("snapshot_before_preemption_failed", error=str(error))
            self._alerts.report(
                f"{KEY_PREEMPTION}-snapshot",
                f"no snapshot could be taken before the end of this machine: {error}",
                hint=error.hint,
            )

    async def _announce(self, notice: _Notice) -> None:
        """Report a notice, and tell the process that uploads, if there is one."""
        left = notice.by_seconds - time.monotonic()
        log.warning("preemption_announced", cause=notice.cause, seconds=round(left), certain=notice.certain)
        self._report()
        self._events.emit("preemption_announced", detail=f"{notice.cause}, in {human_duration(left)}")
        self._on_urgency()
        await self._tell_upload(notice)

    async def _tell_upload(self, notice: _Notice) -> None:
        place = upload_state_dir()

        def tell() -> None:
            # Made by its own process or service manager, with its owner.
            self._is_untold = not place.is_dir()
            if not self._is_untold:
                announce(place, notice.by_seconds - time.monotonic(), notice.cause)

        await self._with_upload(tell)

    async def _make_up(self) -> None:
        """Take the snapshot that failed, and tell an upload that has come since, if an end is still to come."""
        now = time.monotonic()
        coming = [one for one in self._standing.values() if one.by_seconds > now]
        if not coming:
            self._owed, self._is_untold = None, False
            return
        if self._is_untold:
            await self._tell_upload(min(coming, key=lambda one: one.by_seconds))
        if self._owed is not None and now - self._cut_at >= self._again_seconds:
            self._again_seconds = min(2 * self._again_seconds, _MAX_AGAIN_SECONDS)
            await self._cut_unasked(self._owed)

    async def _cut(self, request: SnapshotRequest) -> PendingSnapshot:
        self._cut_at = time.monotonic()
        pending = await self._take(request)
        self._alerts.clear(f"{KEY_PREEMPTION}-snapshot")
        self._on_urgency()
        return pending

    def _report(self) -> None:
        """Report the earliest end that is still to come, or else the last that was announced."""
        now = time.monotonic()
        if not self._standing:
            self._alerts.clear(KEY_PREEMPTION)
            return
        notice = min(self._standing.values(), key=lambda one: (one.by_seconds <= now, one.by_seconds))
        self._alerts.report(
            KEY_PREEMPTION,
            f"this machine {'ends' if notice.certain else 'may end'} soon: {notice.cause}",
            hint="ciuic remote status says what will be stored by then",
            severity="problem" if notice.certain else "warning",
        )

    async def _withdraw(self, key: str) -> None:
        notice = self._standing.pop(key, None)
        if notice is None:
            return
        log.warning("preemption_withdrawn", cause=notice.cause)
        self._events.emit("preemption_withdrawn", detail=notice.cause)
        self._report()
        self._on_urgency()
        await self._with_upload(partial(withdraw, upload_state_dir()))
        for other in list(self._standing.values()):
            if other.by_seconds > time.monotonic():
                await self._announce(other)

    async def _with_upload(self, act: Callable[[], None]) -> None:
        with trio.move_on_after(_ANNOUNCE_SECONDS) as patience:
            try:
                await trio.to_thread.run_sync(act, abandon_on_cancel=True)
            except OSError as error:
                log.error("upload_not_told", error=str(error))
        if patience.cancelled_caught:
            log.error("upload_not_told", error="its state directory does not answer")

    async def _forget_services(self) -> None:
        self._alerts.clear(_KEY_SERVICE)
        for key in [key for key in self._standing if key != _BY_REQUEST]:
            await self._withdraw(key)

    async def _expire(self) -> None:
        """End what was asked for when its end has passed; a service takes its notices back itself."""
        was_near = False
        while True:
            await trio.sleep(_PERIOD_SECONDS)
            known = self._standing.get(_BY_REQUEST)
            if known is not None and known.by_seconds <= time.monotonic():
                del self._standing[_BY_REQUEST]
                self._report()
            if was_near != self.is_near:
                was_near = not was_near
                self._on_urgency()
