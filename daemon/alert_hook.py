"""`alert.command`: a program of the operator's, run with each alert and each incident of a trainer.

It is run without a shell, one at a time, with a JSON document on its standard input and the most important of it in its environment, as
the user that was asked for. Guarantees: nothing waits for it, whatever it does; it and what it has started are killed when it takes
longer than it may; what it says, and that it failed, is in the log. What happens again and again is told three times, then every
ten minutes, with the number of those left out.

Under systemd it is run as a service of its own (systemd-run): the daemon may not open network connections, and its children neither.
How it is started is alert_command.py's business.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import trio

from ciuic.config import AlertConfig
from ciuic.control_types import Event
from ciuic.daemon.alert_command import Prepared, prepare, remove_left_over
from ciuic.daemon.events import EventBus
from ciuic.daemon.worker_process import describe_exit, mark_expendable
from ciuic.errors import NotPermitted
from ciuic.plain_names import escaped, one_line, trainer_key

BURST: Final = 3
PAUSE_SECONDS: Final = 600.0
BURST_OF_A_USER: Final = 30
"""Of all trainers of one: names cost nothing."""
MOST_WAITING: Final = 64
MOST_OUTPUT_BYTES: Final = 4096
_KILL_SECONDS: Final = 2.0
_LAST_WORDS_SECONDS: Final = 0.1
_OF_TRAINERS: Final = "trainer:"
log = structlog.get_logger(__name__)


class Notice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the program reads. ``event``: alert_raised, alert_cleared, trainer_died, trainer_failed, trainer_hung, trainer_lost,
    trainer_recovered."""

    event: str
    time: str
    host: str
    key: str
    severity: str
    message: str
    hint: str = ""
    root: str = ""
    trainer: dict[str, Any] | None = None
    snapshot: str = ""
    no_snapshot: str = ""
    left_out: int = 0
    """Of the same key, since the last one that was told."""

    def environment(self) -> dict[str, str]:
        """For programs that do not read JSON. One line each; the trainer's name as people are shown it."""
        trainer = self.trainer or {}
        found = {
            "CIUIC_EVENT": self.event,
            "CIUIC_KEY": self.key,
            "CIUIC_SEVERITY": self.severity,
            "CIUIC_MESSAGE": self.message,
            "CIUIC_HOST": self.host,
            "CIUIC_TIME": self.time,
            "CIUIC_SNAPSHOT": self.snapshot,
            "CIUIC_TRAINER": escaped(str(trainer.get("name", ""))),
            "CIUIC_PID": str(trainer.get("pid", "")),
        }
        return {name: one_line(value) for name, value in found.items()}


def notice_of(event: Event, host: str) -> Notice | None:
    """None for what nobody needs to be told of."""
    if event.incident is not None:
        incident = event.incident
        return Notice(
            event=event.kind,
            time=incident.time,
            host=host,
            key=trainer_key(incident.trainer.name, incident.trainer.where),
            severity={"recovered": "info", "lost": "warning"}.get(incident.kind, "problem"),
            message=event.detail,
            trainer=msgspec.to_builtins(incident.trainer),
            snapshot=incident.snapshot,
            no_snapshot=incident.no_snapshot,
        )
    # An alert about a trainer says nothing that its incident does not.
    if event.alert is None or event.alert.key.startswith(_OF_TRAINERS):
        return None
    alert = event.alert
    return Notice(
        event=event.kind,
        time=event.time,
        host=host,
        key=alert.key,
        severity=alert.severity,
        message=alert.message,
        hint=alert.hint,
        root=alert.root,
    )


class Pacing:
    """Which of those that come again and again are told."""

    def __init__(
        self, now: Callable[[], float], *, burst: int = BURST, pause_seconds: float = PAUSE_SECONDS
    ) -> None:
        self._now = now
        self._burst, self._pause_seconds = burst, pause_seconds
        self._left: dict[str, tuple[float, float, int]] = {}
        """By key: how many may still be told at once, as of when, and how many were left out."""

    def left_out(self, key: str) -> int | None:
        """How many were left out before this one; None: it is left out as well."""
        now = self._now()
        for known, (left, since, count) in list(self._left.items()):
            if left + (now - since) / self._pause_seconds >= self._burst and not count:
                del self._left[known]
        left, since, count = self._left.get(key, (float(self._burst), now, 0))
        left = min(self._burst, left + (now - since) / self._pause_seconds)
        if left < 1:
            self._left[key] = (left, now, count + 1)
            return None
        self._left[key] = (left - 1, now, 0)
        return count


class AlertHook:
    """``follow`` and ``run`` are its tasks."""

    def __init__(
        self,
        settings: Callable[[], AlertConfig],
        host: str,
        environment: Mapping[str, str],
        *,
        service_directory: Path | None = None,
        on_refusal: Callable[[NotPermitted | None], None] = lambda _: None,
    ) -> None:
        """``service_directory``: root's own directory, where systemd-run is known to work; None elsewhere.
        ``on_refusal`` is told why the command is not run, and None when it is."""
        self._settings = settings
        self._host = host
        self._environment = environment
        self._service_directory = service_directory
        self._on_refusal = on_refusal
        self._send, self._receive = trio.open_memory_channel[Notice](MOST_WAITING)

    async def follow(self, events: EventBus) -> None:
        """Until the bus is closed: takes up what is to be told."""
        pacing = Pacing(trio.current_time)
        of_users = Pacing(
            trio.current_time, burst=BURST_OF_A_USER, pause_seconds=PAUSE_SECONDS / BURST_OF_A_USER
        )
        with events.subscribe() as subscription:
            async for event in subscription.events():
                notice = notice_of(event, self._host) if self._settings().command else None
                if notice is None:
                    continue
                left_out = pacing.left_out(f"{notice.event} {notice.key}")
                user = str((notice.trainer or {}).get("user", ""))
                if left_out is None or (user and of_users.left_out(user) is None):
                    log.info("alert_not_told_again", key=notice.key, kind=notice.event)
                    continue
                notice.left_out = left_out
                try:
                    self._send.send_nowait(notice)
                except trio.WouldBlock:
                    log.error("alert_not_told", key=notice.key, reason="too many wait for the alert command")

    async def run(self) -> None:
        """For ever: one after the other."""
        if self._service_directory is not None:
            remove_left_over(self._service_directory)
        async for notice in self._receive:
            try:
                await self._tell(notice)
            except Exception:
                log.exception("alert_command_failed", key=notice.key)

    async def _tell(self, notice: Notice) -> None:
        settings = self._settings()
        if not settings.command:
            return
        try:
            language = self._environment.get("LANG", "C.UTF-8")
            # In a thread: it looks the user up, and the name service may hang. The alerts after this one wait then, nothing else.
            prepared = await trio.to_thread.run_sync(
                prepare,
                settings,
                notice.environment(),
                language,
                self._service_directory,
                abandon_on_cancel=True,
            )
        except NotPermitted as error:
            log.error("alert_command_refused", key=notice.key, error=error.message, hint=error.hint)
            self._on_refusal(error)
            return
        except (OSError, KeyError) as error:
            log.error("alert_command_failed", key=notice.key, command=settings.command[0], error=str(error))
            return
        self._on_refusal(None)
        try:
            await self._run(notice, settings, prepared)
        finally:
            prepared.discard()

    async def _run(self, notice: Notice, settings: AlertConfig, prepared: Prepared) -> None:
        try:
            process = await trio.lowlevel.open_process(
                prepared.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, cwd="/", **prepared.how,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            log.error("alert_command_failed", key=notice.key, command=settings.command[0], error=str(error))
            return
        mark_expendable(process.pid)
        said = bytearray()
        try:
            in_time = await _attend(process, msgspec.json.encode(notice), said, settings.timeout_seconds)
        finally:
            if process.returncode is None:  # the daemon ends
                with trio.CancelScope(shield=True):
                    await _kill(process)
        output = bytes(said[:MOST_OUTPUT_BYTES]).decode("utf-8", "replace").strip()
        if not in_time:
            log.error(
                "alert_command_killed", key=notice.key, after_seconds=settings.timeout_seconds, output=output
            )
        elif process.returncode:
            log.error(
                "alert_command_failed", key=notice.key, how=describe_exit(process.returncode), output=output
            )
        else:
            log.info("alert_told", key=notice.key, kind=notice.event, output=output)


async def _attend(process: trio.Process, document: bytes, said: bytearray, seconds: float) -> bool:
    """Until it has ended; whether it did so in time."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_feed, process, document)
        nursery.start_soon(_listen, process, said)
        with trio.move_on_after(seconds) as patience:
            await process.wait()
        if patience.cancelled_caught:
            await _kill(process)
        # What it has started may hold the pipe open for ever; what it said itself has been written by now.
        await trio.sleep(_LAST_WORDS_SECONDS)
        nursery.cancel_scope.cancel()
    return not patience.cancelled_caught


async def _feed(process: trio.Process, document: bytes) -> None:
    assert process.stdin is not None
    with suppress(trio.BrokenResourceError):  # it does not want to know
        async with process.stdin:
            await process.stdin.send_all(document)


async def _listen(process: trio.Process, said: bytearray) -> None:
    assert process.stdout is not None
    async with process.stdout:
        async for part in process.stdout:
            if len(said) < MOST_OUTPUT_BYTES:
                said += part


async def _kill(process: trio.Process) -> None:
    """With all that it has started and that did not leave its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with trio.move_on_after(_KILL_SECONDS):
            await process.wait()
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
