"""The alert command: its input, the user it runs as, and that the daemon does not wait for it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing
from support.until import until_async

from ciuic.config import AlertConfig
from ciuic.daemon.base.alert_hook import AlertHook, AlertNotice, Pacing, notice_of, prepare
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.protocol.control_types import Alert, Event, Incident, TrainerStatus


def run_hook(
    command: list[str], raise_alerts: Callable[[Alerts], Awaitable[None]], *, timeout_seconds: int = 20
) -> list[dict[str, Any]]:
    """Return the log of a run in which ``speak`` raised alerts and the hook ran for all of them."""
    events = EventBus(lambda: 0)
    alerts = Alerts(events, lambda: 0)
    hook = AlertHook(lambda: AlertConfig(tuple(command), None, timeout_seconds), "host", {})

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hook.run)
            nursery.start_soon(hook.follow, events)
            await trio.testing.wait_all_tasks_blocked()
            await raise_alerts(alerts)
            nursery.cancel_scope.cancel()

    with structlog.testing.capture_logs() as logs:
        trio.run(main)
    return [dict(entry) for entry in logs]


def test_command_gets_the_alert_as_input(tmp_path: Path) -> None:
    """The command gets one document on stdin and its main fields in the environment; its output is logged."""
    script = tmp_path / "hook"
    script.write_text(
        f'#!/bin/sh\ncat > {tmp_path}/in\necho "$CIUIC_EVENT $CIUIC_KEY" "$@"; env > {tmp_path}/env\n'
    )
    script.chmod(0o755)

    async def raise_alerts(alerts: Alerts) -> None:
        alerts.report("space", "full", hint="prune")
        await until_async(lambda: (tmp_path / "env").exists())
        await trio.sleep(0.3)

    logs = run_hook([str(script), "to"], raise_alerts)
    assert b'"event":"alert_raised"' in (tmp_path / "in").read_bytes()
    assert b'"hint":"prune"' in (tmp_path / "in").read_bytes()
    (entry_of_alert,) = (entry for entry in logs if entry["event"] == "alert_told")
    assert entry_of_alert["output"] == "alert_raised space to"


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("exit 3", "alert_command_failed"),
        ("kill -9 $$", "alert_command_failed"),
        ("trap '' TERM; sleep 60 & wait; sleep 60", "alert_command_killed"),
        ("exec yes", "alert_command_killed"),
    ],
)
def test_a_failing_or_hanging_command_does_not_stop_the_next(
    tmp_path: Path, text: str, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that fails, hangs or writes without end is logged and killed if needed.

    The next one runs all the same.
    """
    monkeypatch.setattr("ciuic.daemon.base.alert_hook._KILL_SECONDS", 0.1)
    script = tmp_path / "hook"
    script.write_text(f'#!/bin/sh\necho "$CIUIC_KEY" >> {tmp_path}/keys\n{text}\n')
    script.chmod(0o755)

    def keys() -> list[str]:
        return (tmp_path / "keys").read_text().split() if (tmp_path / "keys").exists() else []

    async def raise_alerts(alerts: Alerts) -> None:
        alerts.report("a", "a")
        alerts.report("b", "b")
        await until_async(lambda: keys() == ["a", "b"])

    logs = run_hook([str(script)], raise_alerts, timeout_seconds=1)
    assert event in [entry["event"] for entry in logs]


def test_a_program_that_is_not_there_is_logged() -> None:
    """A command that does not exist is logged, and the daemon goes on."""

    async def raise_alerts(alerts: Alerts) -> None:
        alerts.report("a", "a")
        await trio.testing.wait_all_tasks_blocked(0.2)

    assert "alert_command_failed" in [entry["event"] for entry in run_hook(["/nowhere/hook"], raise_alerts)]


def test_repeated_alerts_are_sent_rarely() -> None:
    """A repeated alert is sent three times at once, then every ten minutes with the number left out."""
    now = [0.0]
    pacing = Pacing(lambda: now[0])
    assert [pacing.left_out("k") for _ in range(5)] == [0, 0, 0, None, None]
    assert pacing.left_out("other") == 0
    now[0] = 601.0
    assert [pacing.left_out("k"), pacing.left_out("k")] == [2, None]
    now[0] = 10_000.0
    assert pacing.left_out("k") == 1


def test_incident_is_sent_once() -> None:
    """An incident is sent once, with trainer and snapshot, and not again as the alert it raises."""
    trainer = TrainerStatus(name="t", where="/w", pid=7)
    incident = Incident(kind="died", time="now", trainer=trainer, snapshot="cs-1")
    notice = notice_of(Event(kind="trainer_died", time="x", incident=incident, detail="text"), "h")
    assert notice is not None
    assert (notice.key, notice.snapshot, notice.severity, notice.message) == (
        "trainer:t:/w",
        "cs-1",
        "problem",
        "text",
    )
    assert notice.environment()["CIUIC_PID"] == "7"
    alert = Alert(key="trainer:t:/w", severity="problem", since="x", message="m")
    assert notice_of(Event(kind="alert_raised", time="x", alert=alert), "h") is None
    assert notice_of(Event(kind="snapshot_committed", time="x"), "h") is None


def test_command_is_a_unit_of_its_own_under_systemd(tmp_path: Path) -> None:
    """Under systemd the command runs as a unit of its own, as the daemon's has no network for mail."""
    notice = AlertNotice(event="e", time="t", host="h", key="k", severity="problem", message="a b")
    settings = AlertConfig(("/bin/hook", "x"), "nobody", 30)
    command, how, file = prepare(settings, notice.environment(), "C.UTF-8", tmp_path)
    assert os.path.basename(command[0]) == "systemd-run"
    assert command[-3:] == ["--", "/bin/hook", "x"]
    assert file is not None
    assert {
        "--uid=nobody",
        "--property=RuntimeMaxSec=30",
        f"--property=EnvironmentFile={file}",
    } <= set(command)
    assert 'CIUIC_MESSAGE="a b"' in file.read_text().splitlines()
    assert "user" not in how


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_command_runs_as_the_configured_user(tmp_path: Path) -> None:
    """The command runs as the configured user with that user's groups and without our environment."""
    command, how, _ = prepare(
        AlertConfig(("/usr/bin/id",), "nobody", 30), {"CIUIC_EVENT": "e"}, "C.UTF-8", None
    )
    assert command == ["/usr/bin/id"]
    assert how["user"] > 0
    assert set(how["env"]) == {"CIUIC_EVENT", "HOME", "LANG", "LOGNAME", "PATH", "USER"}
    assert how["env"]["USER"] == "nobody"
