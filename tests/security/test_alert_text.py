"""Attacker: the author of training names.

The text reaches the alert command as data and is never run or expanded.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import structlog
import trio
import trio.testing
from support.real_systemd import RealSystemd, reason_against

from ciuic.cli.commands.status import print_trainers
from ciuic.cli.shared.session import Session
from ciuic.config import AlertConfig
from ciuic.daemon.base import alert_hook
from ciuic.daemon.base.alert_hook import AlertHook, AlertNotice, environment_file, notice_of, prepare
from ciuic.daemon.base.events import EventBus
from ciuic.daemon.trainers.registry import ProcessIdentity, WatchedTrainer
from ciuic.errors import NotPermitted
from ciuic.printable import escaped, one_line, shown_name
from ciuic.protocol.control_types import Alert, Event, Incident, StatusDocument, TrainerStatus

ATTACK = 'a";id>/x;"'
NAMES = [
    ATTACK, "$(id)", "${PATH}", "`id`", "%n %h", "a' b", "\\x3b", "a\u202eb", "-rf", "--help", "м", "\U0001f600", "a\nb", "\x1b[2J", "",
    "a b", "'", "\ud800",
]  # fmt: skip
_ALPHABET = set(string.ascii_letters + string.digits + "._@:+,=/- \\'")


def notice(name: str = ATTACK, message: str = "") -> AlertNotice:
    """Return the notice of one dead training, as the alert command gets it."""
    trainer = TrainerStatus(name=name, where=f"/home/{name}", pid=7, user="eve")
    incident = Incident(kind="died", time="now", trainer=trainer, reason=name)
    found = notice_of(Event(kind="trainer_died", time="now", incident=incident, detail=message or name), "h")
    assert found is not None
    return found


def prepared(
    command: tuple[str, ...], alert: AlertNotice, place: Path, user: str | None = None
) -> alert_hook.Prepared:
    return prepare(AlertConfig(command, user, 30), alert.environment(), "C.UTF-8", place)


# --- with a real systemd


@pytest.fixture(scope="module")
def systemd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealSystemd, Path]]:
    if reason := reason_against():
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("systemd")
    with RealSystemd(place, [place]) as made:
        yield made, place


def run_in(
    systemd: tuple[RealSystemd, Path], script: str, alert: AlertNotice, user: str | None = None
) -> str:
    """Return what ``script`` prints as the operator's alert command for this notice under systemd."""
    made, place = systemd
    ready = prepared(("/bin/sh", "-c", script, "${CIUIC_TRAINER}", "$HOME", "100%"), alert, place, user)
    try:
        done = made.run(ready.command, input=msgspec.json.encode(alert).decode())
    finally:
        ready.discard()
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.mount
def test_systemd_expands_nothing_of_a_trainers_name(systemd: tuple[RealSystemd, Path]) -> None:
    """A training's name with ``${…}`` is expanded by the alert command's shell alone, within its quotes."""
    made, place = systemd
    mark = place / "x"
    attack = f'a";id>{mark};"'
    output = run_in(systemd, 'printf "%s\\n" "${CIUIC_TRAINER}" "$0" "$1" "$2"', notice(attack))
    assert output.splitlines() == [escaped(attack), "${CIUIC_TRAINER}", "$HOME", "100%"]
    assert run_in(systemd, f'eval "echo ${{CIUIC_TRAINER}}" > {place}/out; cat', notice(attack)).startswith(
        "{"
    )
    assert not mark.exists()
    assert made.run(["test", "-e", str(mark)]).returncode == 1


@pytest.mark.mount
def test_values_arrive_as_they_were(systemd: tuple[RealSystemd, Path]) -> None:
    """Quotes, backslashes, dollar and percent signs and outer blanks reach the command unchanged."""
    text = "  it's \"$HOME\" ${PATH} `id` \\ \\n %h #x ; = \t é \U0001f600 '  "
    alert = notice(message=text)
    script = 'printf "%s" "$CIUIC_MESSAGE"; id -u >&2'
    for user in (None, "nobody"):
        assert run_in(systemd, script, alert, user) == one_line(text)
    document = json.loads(run_in(systemd, "cat", alert))
    assert document["message"] == text
    assert document["trainer"]["name"] == ATTACK


# --- without systemd


def test_no_argument_has_anything_of_an_attackers_text(tmp_path: Path) -> None:
    """An alert's text is in no argument, only in a file of root's that is removed afterwards.

    Arguments are visible to every user, and systemd expands them.
    """
    ready = prepared(("/bin/true", "$x", "a$$b", "${HOME}"), notice(), tmp_path)
    assert not [word for word in ready.command if "id>" in word or "CIUIC_" in word]
    assert ready.command[-4:] == ["/bin/true", "$$x", "a$$$$b", "$${HOME}"]
    assert ready.file is not None
    assert ready.file.stat().st_mode & 0o777 == 0o600
    assert ready.file.parent == tmp_path
    ready.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_variables_is_one_line_for_each() -> None:
    """A file of variables has one line for each value; no content makes a second assignment."""
    hostile = {"A": 'x"\nLD_PRELOAD="/x', "B": "\\", "C": "$(id)`id`", "D": "\ud800"}
    lines = environment_file({name: one_line(value) for name, value in hostile.items()}).split(b"\n")
    assert [line.partition(b"=")[0] for line in lines] == [b"A", b"B", b"C", b"D", b""]


def test_a_program_whose_path_systemd_would_expand_is_not_run(tmp_path: Path) -> None:
    """A program whose path systemd would expand is not run: systemd-run looks it up unescaped."""
    with pytest.raises(NotPermitted, match=r"expand the \$"):
        prepared(("/opt/$x/hook",), notice(), tmp_path)


def send_alert(settings: AlertConfig, place: Path | None, **how: Any) -> list[dict[str, Any]]:
    """Send one alert; return the log."""
    events = EventBus(lambda: 0)

    async def main() -> None:
        hook = AlertHook(lambda: settings, "host", {}, service_directory=place, **how)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hook.run)
            nursery.start_soon(hook.follow, events)
            await trio.testing.wait_all_tasks_blocked()
            alert = Alert(key="k", severity="problem", since="now", message=ATTACK)
            events.emit("alert_raised", alert=alert)
            with trio.move_on_after(20):
                while not any(entry["event"].startswith("alert_") for entry in logs):  # noqa: ASYNC110
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()

    with structlog.testing.capture_logs() as logs:
        trio.run(main)
    return [dict(entry) for entry in logs]


def test_nothing_is_left_of_a_run_or_of_a_daemon_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of variables exists only while the command runs; an old one is removed at the start."""
    fake = tmp_path / "systemd-run"
    fake.write_text(f"#!/bin/sh\nls {tmp_path}/run > {tmp_path}/seen\n")
    fake.chmod(0o755)
    monkeypatch.setattr(alert_hook, "find_program", lambda name: str(fake))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/alert-old.env").write_text("secret")
    (tmp_path / "run/pending.json").write_text("[]")
    logs = send_alert(AlertConfig(("/bin/true",), None, 20), tmp_path / "run")
    assert "alert_told" in [entry["event"] for entry in logs]
    seen = (tmp_path / "seen").read_text().split()
    assert len(seen) == 2
    assert "alert-old.env" not in seen
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["pending.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a program that others may write to is a danger to root")
@pytest.mark.parametrize("interpreter", [[], ["/bin/sh"]])
def test_a_program_that_others_may_write_is_not_run(tmp_path: Path, interpreter: list[str]) -> None:
    """A program that other users may write is not run as root; log and caller get the reason."""
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o777)
    refusals: list[NotPermitted | None] = []
    logs = send_alert(AlertConfig((*interpreter, str(hook)), None, 20), None, on_refusal=refusals.append)
    assert [entry["event"] for entry in logs] == ["alert_command_refused"]
    assert refusals[0] is not None
    assert "writable by others" in refusals[0].message
    assert f"chmod go-w {hook}" in refusals[0].hint
    assert not (tmp_path / "ran").exists()


# --- names


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown_in_a_plain_alphabet(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names appear in labels, keys, logs, alerts, hints and on the screen in a plain alphabet.

    A shell takes such a name for one word and expands nothing in it.
    """
    trainer = WatchedTrainer(
        ProcessIdentity(1, 7, 1), -1, name=name, where=name, kind="library", heartbeat_seconds=0, since_ns=0
    )
    for text in (trainer.label, trainer.key, notice(name).key, notice(name).environment()["CIUIC_TRAINER"]):
        assert set(text) <= _ALPHABET | set("(), "), text
    words = f"printf '%s\\n' {shown_name(name)}"
    output = subprocess.run(["/bin/sh", "-c", words], capture_output=True, text=True, check=True).stdout
    assert output == escaped(name) + "\n"
    assert not any(char in one_line(name) for char in "\n\x1b\u202e\ud800")
    time = "2026-01-01T00:00:00+00:00"
    status = TrainerStatus(
        name=name, where=name, pid=7, user="eve", failed_saves=2, failing_since=time, save_error="no room"
    )
    incident = Incident(kind="died", time=time, trainer=status, reason="killed")
    with click.Context(click.Command("status"), obj=Session()):
        print_trainers(
            StatusDocument(version="0", pid=1, since="", now="", trainers=[status], incidents=[incident])
        )
    output = capsys.readouterr().out
    assert ATTACK not in output
    assert f"{shown_name(name)}: 2 saves in a row have failed since 2026-01-01 00:00:00: no room" in output


def test_two_names_are_never_shown_alike() -> None:
    """Two different names are never shown alike, nor is one taken for the escaped form of another."""
    assert len({shown_name(name) for name in [*NAMES, *map(escaped, NAMES)]}) == len(
        {*NAMES, *map(escaped, NAMES)}
    )


def test_plain_names_stay_as_they_are() -> None:
    """Paths, versions and addresses of the usual kinds are shown unchanged."""
    for name in ("resnet-50", "/data/run_3/a.b", "user@host:1", "lr=0.1,wd=0"):
        assert shown_name(name) == name
