"""Messages to `alert.notify` and pings to `alert.ping`: queues, and a process with network for each message.

Guarantees: nothing waits for a delivery; at most `_MAX_WAITING` messages wait, further ones are logged and dropped; a place that does
not answer delays messages of its kind alone. URLs reach the process by its standard input and are in no log. A message that could not be
delivered is the alert `notify` until the next one is. Which alerts are told, and how often, is as for the alert command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog
import trio

from ciuic.config import AlertConfig
from ciuic.daemon.base.alert_hook import AlertNotice, NoticeFilter, prepare, run_prepared
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.notify_process import EXIT_WITHOUT_APPRISE, NotifyJob
from ciuic.errors import NotPermitted, pip_install
from ciuic.protocol.control_types import Event
from ciuic.system.child_process import environment, module_command

NOTIFY_MODULE: Final = "ciuic.daemon.notify_process"
KEY_NOTIFY: Final = "notify"
_MAX_WAITING: Final = 64
_LIMIT_SECONDS: Final = 180
"""Time of one process, which tries four times."""
_PAUSES_SECONDS: Final = (2.0, 10.0, 30.0)
"""Pauses before the second and each further try."""
_STATES: Final[Mapping[str, Literal["start", "success", "fail"]]] = {
    "snapshot_cut": "start",
    "snapshot_committed": "success",
    "snapshot_failed": "fail",
}
log = structlog.get_logger(__name__)


def message_of(notice: AlertNotice) -> NotifyJob:
    """Return the message of a notice, without its places."""
    is_over = notice.event in ("alert_cleared", "trainer_recovered")
    lines = [notice.message, notice.hint if not is_over else "", f"host {notice.host}, {notice.time}"]
    if notice.snapshot:
        lines.append(f"emergency snapshot: {notice.snapshot}")
    if notice.left_out:
        lines.append(f"{notice.left_out} more like this were not told")
    return NotifyJob(
        title=f"[{notice.host}] {'over: ' if is_over else ''}{notice.key}",
        text="\n".join(filter(None, lines)),
        kind="success" if is_over else "warning" if notice.severity == "warning" else "failure",
    )


def ping_of(event: Event) -> NotifyJob | None:
    """Return the ping of an event, without its URL; None for an event that is none of a snapshot."""
    state = _STATES.get(event.kind)
    if state is None or event.snapshot is None:
        return None
    found = event.snapshot
    text = f"{found.id} {', '.join(found.roots)}" + (f": {found.error}" if found.error else "")
    return NotifyJob(state=state, snapshot=found.id, text=text)


class Deliveries:
    """Queues of messages and pings. `run` is the task."""

    def __init__(
        self,
        settings: Callable[[], AlertConfig],
        host: str,
        environ: Mapping[str, str],
        alerts: Alerts,
        *,
        service_directory: Path | None = None,
    ) -> None:
        """Prepare to deliver.

        Args:
            settings: returns the configuration.
            host: name of this host.
            environ: the daemon's environment, for LANG.
            alerts: where a failure is reported.
            service_directory: root's own directory, where systemd-run is known to work; None elsewhere.
        """
        self._settings = settings
        self._host = host
        self._environ = environ
        self._alerts = alerts
        self._service_directory = service_directory
        self._queues = {
            kind: trio.open_memory_channel[NotifyJob](_MAX_WAITING) for kind in ("notify", "ping")
        }

    async def run(self, events: EventBus) -> None:
        """Deliver what events say, until the bus is closed."""
        async with trio.open_nursery() as nursery:
            for kind in self._queues:
                nursery.start_soon(self._deliver, kind)
            await self._follow(events)
            nursery.cancel_scope.cancel()

    async def _follow(self, events: EventBus) -> None:
        notices = NoticeFilter(self._host)
        with events.subscribe() as subscription:
            async for event in subscription.events():
                settings = self._settings()
                if settings.notify and (notice := notices.notice(event)) is not None:
                    self._queue("notify", message_of(notice))
                if settings.ping and (ping := ping_of(event)) is not None:
                    self._queue("ping", ping)

    def _queue(self, kind: str, job: NotifyJob) -> None:
        try:
            self._queues[kind][0].send_nowait(job)
        except trio.WouldBlock:
            log.error("message_not_sent", kind=kind, reason="too many wait")

    async def _deliver(self, kind: str) -> None:
        async for job in self._queues[kind][1]:
            settings = self._settings()
            # The URLs of now: a reload may have taken them away.
            places = {"urls": settings.notify} if kind == "notify" else {"ping": settings.ping or ""}
            addressed = msgspec.structs.replace(job, pauses_seconds=_PAUSES_SECONDS, **places)
            if not addressed.urls and not addressed.ping:
                continue
            try:
                await self._send(kind, addressed, settings)
            except Exception:
                log.exception("message_not_sent", kind=kind)

    async def _send(self, kind: str, job: NotifyJob, settings: AlertConfig) -> None:
        command = msgspec.structs.replace(
            settings, command=tuple(module_command(NOTIFY_MODULE)), timeout_seconds=_LIMIT_SECONDS
        )
        key = f"{KEY_NOTIFY}:{kind}"
        try:
            prepared = await trio.to_thread.run_sync(
                prepare,
                command,
                environment(),
                self._environ.get("LANG", "C.UTF-8"),
                self._service_directory,
                abandon_on_cancel=True,
            )
            end = await run_prepared(prepared, msgspec.json.encode(job), _LIMIT_SECONDS)
        except NotPermitted as error:
            self._alerts.report(key, f"alert.{kind} is not sent: {error.message}", severity="warning")
            return
        except (OSError, KeyError) as error:
            log.error("message_not_sent", kind=kind, error=str(error))
            return
        if end.in_time and not end.status:
            log.info("message_sent", kind=kind)
            self._alerts.clear(key)
            return
        log.error("message_not_sent", kind=kind, in_time=end.in_time, output=end.output)
        lacking = end.status == EXIT_WITHOUT_APPRISE
        self._alerts.report(
            key,
            f"a message to alert.{kind} was not delivered"
            + (": apprise is not installed" if lacking else ""),
            hint=pip_install("ciuic[notify]") if lacking else "the log of the daemon says which place failed",
            severity="warning",
        )
