"""Alert hook: run `alert.command` for each alert and each incident of a trainer.

The command is run without a shell, one at a time, as the configured user, with a JSON document on its
standard input and the most important fields in its environment. Guarantees: nothing waits for it; it and the
processes that it has started are killed when it exceeds its time limit; its output and its failure are in the
log. An event that repeats is told three times, then every ten minutes, with the number of events that were
left out.

The operator's command is run word by word, and no text of a user is part of any command line: it is in the
JSON on standard input and in environment variables. A program that others may write to is not run. Under
systemd the command is run as a service of its own (systemd-run), because the daemon and its children may not
open network connections. The variables are then in a file that only root can read, because systemd expands
`$` in arguments and shows them to everybody.

Messages to `alert.notify` and pings to `alert.ping`: queues, and a process with network for each message.

Guarantees: nothing waits for a delivery; at most `_MAX_WAITING` messages wait, further ones are logged and dropped; a place that does
not answer delays messages of its kind alone. URLs reach the process by its standard input and are in no log. A message that could not be
delivered is the alert `notify` until the next one is. Which alerts are told, and how often, is as for the alert command.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import structlog
import trio

from ciuic.config import AlertConfig, alert_flaw
from ciuic.daemon.base.child_processes import mark_expendable
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.notify_process import EXIT_WITHOUT_APPRISE, NotifyJob
from ciuic.errors import NotPermitted, pip_install
from ciuic.printable import escaped, one_line
from ciuic.protocol.control_types import Event, trainer_key
from ciuic.system.child_process import SYSTEM_PATH, environment, find_program, module_command
from ciuic.system.processes import describe_exit

NOTIFY_MODULE: Final = "ciuic.daemon.base.notify_process"
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


_MAX_TITLE: Final = 90
"""Characters of what happened in the subject of a mail: a telephone shows as many."""


def message_of(notice: AlertNotice) -> NotifyJob:
    """Return the message of a notice, without its places."""
    is_over = notice.event in ("alert_cleared", "trainer_recovered")
    lines = [notice.message, notice.hint if not is_over else "", f"host {notice.host}, {notice.time}"]
    if notice.snapshot:
        lines.append(f"emergency snapshot: {notice.snapshot}")
    if notice.left_out:
        lines.append(f"{notice.left_out} more like this were not told")
    summary = one_line(notice.message)
    if len(summary) > _MAX_TITLE:
        summary = f"{summary[:_MAX_TITLE].rpartition(' ')[0] or summary[:_MAX_TITLE]} …"
    return NotifyJob(
        title=f"[{notice.host}] {'over: ' if is_over else ''}{summary}",
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


# An event that repeats is told three times at once, and then every ten minutes.
_BURST: Final = 3
_PAUSE_SECONDS: Final = 600.0
# Burst of all trainers of one user: each name has a burst of its own, and a user may register many names.
_BURST_OF_A_USER: Final = 30
# Notices that wait while a slow command runs; further ones are logged and dropped.
_MAX_WAITING_NOTICES: Final = 64
# Output of the command that is logged; the rest is read and discarded, so that the command never blocks on a
# full pipe.
_MAX_OUTPUT_BYTES: Final = 4096
# Time between SIGTERM and SIGKILL.
_KILL_SECONDS: Final = 2.0
# Time for the pipe to be read after the command has ended, in case a child of it holds the pipe open.
_LAST_WORDS_SECONDS: Final = 0.1
_OF_TRAINERS: Final = "trainer:"
_PREFIX: Final = "alert-"
_SUFFIX: Final = ".env"
# Characters that need a backslash in a value between double quotes (systemd.exec(5), EnvironmentFile=).
_SPECIAL: Final = frozenset('"\\`$')


class Prepared(NamedTuple):
    """A command that is ready to be started. Call `discard` when it has ended."""

    command: list[str]
    how: dict[str, Any]
    """Keyword arguments for subprocess.Popen."""
    file: Path | None = None

    def discard(self) -> None:
        """Remove the file with the variables, if there is one."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink(missing_ok=True)


def prepare(
    settings: AlertConfig, variables: Mapping[str, str], language: str, directory: Path | None
) -> Prepared:
    """Prepare one run of the command.

    Args:
        settings: the command, its user and time limit.
        variables: environment variables about the alert.
        language: value of LANG.
        directory: directory of root's own for the file of variables; None: start the command without systemd.

    Raises:
        NotPermitted: others may write to the program.
        KeyError: there is no such user.
        OSError: the file cannot be written.
    """
    flaw = alert_flaw(settings)
    if flaw is not None:
        raise NotPermitted(f"alert.command is not run: the {flaw.found}", hint=flaw.remedy)
    variables = {"PATH": SYSTEM_PATH, "LANG": language, **variables}
    if directory is not None:
        return _as_service(settings, variables, directory)
    how: dict[str, Any] = {"env": variables}
    if settings.user is not None:
        user = pwd.getpwnam(settings.user)
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        how |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
        variables |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    return Prepared(list(settings.command), how)


def _as_service(settings: AlertConfig, variables: Mapping[str, str], directory: Path) -> Prepared:
    program, *words = settings.command
    if "$" in program:
        raise NotPermitted(
            f"alert.command is not run: systemd would expand the $ in {program}", hint="give it another name"
        )
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=directory)  # 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(environment_file(variables))
    command = [
        find_program("systemd-run"),
        # --collect: a unit that failed is removed too, and does not pile up in systemd.
        *("--pipe", "--wait", "--collect", "--quiet", "--service-type=exec"),
        # systemd keeps the time limit as well: the command is a child of systemd, and killing systemd-run
        # would leave it running.
        f"--property=RuntimeMaxSec={settings.timeout_seconds}",
        f"--property=EnvironmentFile={name}",
        *([] if settings.user is None else [f"--uid={settings.user}"]),
        "--",
        program,
        # A dollar sign is doubled for systemd, which expands variables in arguments (systemd.service(5),
        # COMMAND LINES).
        *(word.replace("$", "$$") for word in words),
    ]
    # Variables reach the command by the file alone; systemd-run itself needs none.
    return Prepared(command, {"env": {"PATH": SYSTEM_PATH}}, Path(name))


def environment_file(variables: Mapping[str, str]) -> bytes:
    """Return the variables in the format of EnvironmentFile= of systemd.exec(5), where nothing is expanded.

    The encoding is UTF-8.
    """
    lines = []
    for name, value in variables.items():
        quoted = "".join(f"\\{char}" if char in _SPECIAL else char for char in value)
        lines.append(f'{name}="{quoted}"\n')
    return "".join(lines).encode("utf-8", "backslashreplace")


class AlertNotice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Document that the command reads."""

    event: str
    """Kind: alert_raised, alert_cleared, trainer_died, trainer_failed, trainer_hung, trainer_lost or
    trainer_recovered."""
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
    """Events of the same key that were not told since the last one that was."""

    def environment(self) -> dict[str, str]:
        """Return the variables for programs that do not read JSON.

        One line each; the trainer's name is escaped for display.
        """
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


def notice_of(event: Event, host: str) -> AlertNotice | None:
    """Return the notice for an event; None for an event that is no alert and no incident."""
    if event.incident is not None:
        incident = event.incident
        return AlertNotice(
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
    # An alert about a trainer repeats what its incident says.
    if event.alert is None or event.alert.key.startswith(_OF_TRAINERS):
        return None
    alert = event.alert
    return AlertNotice(
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
    """Rate limit for each key: a burst at first, then one for each pause."""

    def __init__(
        self, now: Callable[[], float], *, burst: int = _BURST, pause_seconds: float = _PAUSE_SECONDS
    ) -> None:
        self._now = now
        self._burst, self._pause_seconds = burst, pause_seconds
        # Tokens that are left, time of that count, and number of events left out since, by key.
        self._left: dict[str, tuple[float, float, int]] = {}

    def left_out(self, key: str) -> int | None:
        """Count an event, and return how many were left out before it; None: this one is left out as well."""
        now = self._now()
        # A key whose burst is whole again, with nothing left out, says no more than an unknown one. Users
        # choose the keys, so the table must not keep them.
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


class NoticeFilter:
    """Notices of events, without those that repeat too often. Belongs to the trio thread."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._pacing = Pacing(trio.current_time)
        self._of_users = Pacing(
            trio.current_time, burst=_BURST_OF_A_USER, pause_seconds=_PAUSE_SECONDS / _BURST_OF_A_USER
        )

    def notice(self, event: Event) -> AlertNotice | None:
        """Return the notice for an event; None where there is none, or it is left out."""
        notice = notice_of(event, self._host)
        if notice is None:
            return None
        left_out = self._pacing.left_out(f"{notice.event} {notice.key}")
        user = str((notice.trainer or {}).get("user", ""))
        if left_out is None or (user and self._of_users.left_out(user) is None):
            log.info("alert_not_told_again", key=notice.key, kind=notice.event)
            return None
        notice.left_out = left_out
        return notice


class AlertHook:
    """Queue of notices and their delivery. `follow` and `run` are its tasks."""

    def __init__(
        self,
        settings: Callable[[], AlertConfig],
        host: str,
        environment: Mapping[str, str],
        *,
        service_directory: Path | None = None,
        on_refusal: Callable[[NotPermitted | None], None] = lambda _: None,
    ) -> None:
        """Prepare to run the command.

        Args:
            settings: returns the configuration of the command.
            host: name of this host, for the notices.
            environment: the daemon's environment, for LANG.
            service_directory: root's own directory, where systemd-run is known to work; None elsewhere.
            on_refusal: called with the reason for which the command is not run, and with None when it is.
        """
        self._settings = settings
        self._host = host
        self._environment = environment
        self._service_directory = service_directory
        self._on_refusal = on_refusal
        self._send, self._receive = trio.open_memory_channel[AlertNotice](_MAX_WAITING_NOTICES)

    async def follow(self, events: EventBus) -> None:
        """Queue notices of events, until the bus is closed."""
        notices = NoticeFilter(self._host)
        with events.subscribe() as subscription:
            async for event in subscription.events():
                notice = notices.notice(event) if self._settings().command else None
                if notice is None:
                    continue
                try:
                    self._send.send_nowait(notice)
                except trio.WouldBlock:
                    log.error("alert_not_told", key=notice.key, reason="too many wait for the alert command")

    async def run(self) -> None:
        """Run the command for queued notices, one after the other, until cancelled."""
        if self._service_directory is not None:
            # Remove files of variables that a killed daemon left.
            with suppress(OSError):
                for path in self._service_directory.glob(f"{_PREFIX}*{_SUFFIX}"):
                    path.unlink(missing_ok=True)
        async for notice in self._receive:
            try:
                await self._tell(notice)
            except Exception:
                log.exception("alert_command_failed", key=notice.key)

    async def _tell(self, notice: AlertNotice) -> None:
        settings = self._settings()
        if not settings.command:
            return
        try:
            language = self._environment.get("LANG", "C.UTF-8")
            # In a thread: it looks up the user, and the name service may hang. Only the alerts after this one
            # wait then.
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
        await self._run(notice, settings, prepared)

    async def _run(self, notice: AlertNotice, settings: AlertConfig, prepared: Prepared) -> None:
        try:
            in_time, status, output = await run_prepared(
                prepared, msgspec.json.encode(notice), settings.timeout_seconds
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.error("alert_command_failed", key=notice.key, command=settings.command[0], error=str(error))
            return
        if not in_time:
            log.error(
                "alert_command_killed", key=notice.key, after_seconds=settings.timeout_seconds, output=output
            )
        elif status:
            log.error("alert_command_failed", key=notice.key, how=describe_exit(status), output=output)
        else:
            log.info("alert_told", key=notice.key, kind=notice.event, output=output)


class CommandEnd(NamedTuple):
    """Exit status and output of a command."""

    in_time: bool
    status: int
    output: str
    """Beginning of what it printed."""


async def run_prepared(prepared: Prepared, document: bytes, seconds: float) -> CommandEnd:
    """Run a command to its end, or kill it with what it has started at its time limit.

    Args:
        prepared: the command; what belongs to it is discarded.
        document: its standard input.
        seconds: time limit.

    Raises:
        OSError, subprocess.SubprocessError: it could not be started.
    """
    try:
        # A session of its own, so that its process group can be killed.
        process = await trio.lowlevel.open_process(
            prepared.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, cwd="/", **prepared.how,
        )  # fmt: skip
        mark_expendable(process.pid)
        said = bytearray()
        try:
            in_time = await _attend(process, document, said, seconds)
        finally:
            if process.returncode is None:  # the daemon ends
                with trio.CancelScope(shield=True):
                    await _kill(process)
    finally:
        prepared.discard()
    output = bytes(said[:_MAX_OUTPUT_BYTES]).decode("utf-8", "replace").strip()
    return CommandEnd(in_time, process.returncode or 0, output)


async def _attend(process: trio.Process, document: bytes, said: bytearray, seconds: float) -> bool:
    """Feed and read a process until it has ended, and return whether it ended in time.

    It is killed otherwise.

    Args:
        process: process that was just started.
        document: text for its standard input.
        said: receives its output.
        seconds: time limit.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_feed, process, document)
        nursery.start_soon(_listen, process, said)
        with trio.move_on_after(seconds) as patience:
            await process.wait()
        if patience.cancelled_caught:
            await _kill(process)
        # Processes that it has started may hold the pipe open for ever; its own output has been written by
        # now.
        await trio.sleep(_LAST_WORDS_SECONDS)
        nursery.cancel_scope.cancel()
    return not patience.cancelled_caught


async def _feed(process: trio.Process, document: bytes) -> None:
    assert process.stdin is not None
    with suppress(trio.BrokenResourceError):  # it does not read its standard input
        async with process.stdin:
            await process.stdin.send_all(document)


async def _listen(process: trio.Process, said: bytearray) -> None:
    assert process.stdout is not None
    async with process.stdout:
        async for part in process.stdout:
            if len(said) < _MAX_OUTPUT_BYTES:
                said += part


async def _kill(process: trio.Process) -> None:
    """Kill a process together with everything that it has started and that did not leave its process group."""
    # The process group, because the command may be a shell script whose children do the work.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with trio.move_on_after(_KILL_SECONDS):
            await process.wait()
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
