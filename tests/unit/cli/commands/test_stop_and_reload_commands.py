"""`ciuic stop`, `ciuic reload`, and what commands report about the daemon of this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.fake_daemon import FakeDaemon

from ciuic.cli.app import cli
from ciuic.protocol.control_types import (
    ErrorDocument,
    ReloadReport,
    RootChange,
    RootStatus,
    SnapshotState,
    StatusDocument,
)
from ciuic.system import service_manager
from ciuic.system.open_files import MountUser


@pytest.fixture
def config(short_tmp: Path) -> Path:
    """Write a configuration whose daemon would listen beside it."""
    file = short_tmp / "c.toml"
    file.write_text(f'[daemon]\nruntime_dir = "{short_tmp}/run"\n[control]\nsocket = "{short_tmp}/s"\n')
    (short_tmp / "run").mkdir()
    return file


@pytest.fixture
def daemon(config: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(config.with_name("s"))
    yield fake
    fake.stop()


def ciuic(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--config", str(config), *arguments])


def status_document(**fields: Any) -> StatusDocument:
    base: dict[str, Any] = {"version": "9.9", "pid": 77, "since": "2023-06-15T10:00:00+00:00", "now": ""}
    return StatusDocument(**base | fields)


# reload


def test_reload_reports_what_changed(config: Path, daemon: FakeDaemon) -> None:
    """Reload names the file, each root that was added or removed, and keys that need a restart."""
    report = ReloadReport(
        config_path=str(config),
        changes=[
            RootChange(path="/a", change="added", state="mounted"),
            RootChange(path="/b", change="removed", state="unmounted"),
        ],
        at_restart=["control.socket"],
    )
    daemon.answers["POST /v1/reload"] = lambda _: (200, report)
    result = ciuic(config, "reload")
    assert result.exit_code == 0, result.stderr
    assert f"{config} is in force" in result.stdout
    assert "/a is protected, mounted" in result.stdout
    assert "/b is no longer protected" in result.stdout
    assert "control.socket: in force from the next start" in result.stderr
    document = json.loads(ciuic(config, "reload", "--json").stdout)
    assert [change["path"] for change in document["changes"]] == ["/a", "/b"]


def test_reload_names_a_root_that_did_not_mount(config: Path, daemon: FakeDaemon) -> None:
    """An added root that is not mounted makes reload exit with 8, with the reason."""
    change = RootChange(path="/a", change="added", state="failed", error="/a is not there")
    daemon.answers["POST /v1/reload"] = lambda _: (200, ReloadReport(config_path="/c", changes=[change]))
    result = ciuic(config, "reload")
    assert result.exit_code == 8
    assert "/a: /a is not there" in result.stderr


def test_reload_of_an_invalid_file_is_the_daemons_refusal(config: Path, daemon: FakeDaemon) -> None:
    """A refusal by the daemon gives reload its message and exit code; the command's own check only warns."""
    config.write_text(config.read_text() + "[schedule]\nintervall = 3\n")
    refusal = ErrorDocument(error="c.toml:6: unknown key schedule.intervall", hint="did you mean …", code=2)
    daemon.answers["GET /v1/status"] = lambda _: (200, status_document())
    daemon.answers["POST /v1/reload"] = lambda _: (400, refusal)
    result = ciuic(config, "reload")
    assert result.exit_code == 2
    assert "c.toml:6: unknown key schedule.intervall" in result.stderr


def test_a_daemon_of_an_older_version_is_understood(config: Path, daemon: FakeDaemon) -> None:
    """An empty answer, as older daemons give, is a success without details."""
    daemon.answers["POST /v1/reload"] = lambda _: (200, {})
    assert ciuic(config, "reload").exit_code == 0


# stop


def test_stop_waits_for_the_end_and_names_the_mounts(config: Path, daemon: FakeDaemon) -> None:
    """The daemon does not answer after stop and its lock is free; each root is named."""
    roots = [RootStatus(path="/data/a", state="mounted", open_files=1)]
    lock = config.with_name("run") / "daemon.lock"
    lock.write_text("77\n")
    status_calls: list[str] = []

    def status(_: Any) -> tuple[int, Any]:
        status_calls.append("status")
        if len(status_calls) < 4:
            return 200, status_document(roots=roots, stopping=len(status_calls) > 1)
        lock.unlink()
        return 503, ErrorDocument(error="the daemon is stopping", code=5)

    daemon.answers["GET /v1/status"] = status
    daemon.answers["POST /v1/stop"] = lambda _: (202, {})
    result = ciuic(config, "stop")
    assert result.exit_code == 0, result.stderr
    assert len(status_calls) == 4
    assert "the daemon (pid 77) has ended" in result.stdout
    assert "/data/a: unmounted" in result.stdout
    assert "no snapshots are taken until it runs again" in result.stderr


def test_stop_names_who_is_in_a_root(
    config: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that is served on because somebody is in it is named with the processes, and is no failure."""
    monkeypatch.setattr("ciuic.config.is_ciuic_mount", lambda path, mounts: True, raising=False)
    monkeypatch.setattr("ciuic.system.open_files.mount_users", lambda path: [MountUser(5, "python3")])
    answers = iter([(200, status_document(roots=[RootStatus(path="/data/a")]))])
    daemon.answers["GET /v1/status"] = lambda _: next(
        answers, (503, ErrorDocument(error="the daemon is stopping", code=5))
    )
    daemon.answers["POST /v1/stop"] = lambda _: (202, {})
    result = ciuic(config, "stop")
    assert result.exit_code == 0, result.stderr
    assert "/data/a: served until nobody is in it, then unmounted: python3 (pid 5)" in result.stdout


def test_stop_without_a_daemon_is_5(config: Path) -> None:
    """Stop without a daemon exits with 5, as every command that asks the daemon."""
    assert ciuic(config, "stop").exit_code == 5


def test_stop_without_a_daemon_says_how_mounts_are_taken_away(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a killed daemon, whose workers serve on, the mounted roots are named with the way to unmount them."""
    config.write_text(config.read_text() + '[[root]]\npath = "/data/a"\n[[root]]\npath = "/data/b"\n')
    monkeypatch.setattr(
        "ciuic.config.is_ciuic_mount", lambda path, mounts: str(path) == "/data/b", raising=False
    )
    result = ciuic(config, "stop")
    assert result.exit_code == 5
    assert "still mounted: /data/b" in result.stderr
    assert "start the daemon" in result.stderr
    assert "umount -l /data/b" in result.stderr
    assert "/data/a" not in result.stderr


def test_stop_names_what_is_still_mounted(
    config: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that the daemon could not unmount is named and makes stop exit with 8, in JSON too."""
    monkeypatch.setattr("ciuic.config.places.is_ciuic_mount", lambda path, mounts: str(path) == "/data/b")
    monkeypatch.setattr(
        "ciuic.config.is_ciuic_mount", lambda path, mounts: str(path) == "/data/b", raising=False
    )
    answers = iter([(200, status_document(roots=[RootStatus(path="/data/a"), RootStatus(path="/data/b")]))])
    daemon.answers["GET /v1/status"] = lambda _: next(
        answers, (503, ErrorDocument(error="the daemon is stopping", code=5))
    )
    daemon.answers["POST /v1/stop"] = lambda _: (202, {})
    result = ciuic(config, "stop", "--json")
    assert result.exit_code == 8
    document = json.loads(result.stdout)
    assert [(root["path"], root["mounted"]) for root in document["roots"]] == [
        ("/data/a", False),
        ("/data/b", True),
    ]
    assert "/data/b" in result.stderr


# A typing error in the configuration


@pytest.mark.parametrize("typo", ["[schedule]\nintervall = '1h'\n", "[schedule\n", "interval == 3\n"])
def test_a_typo_is_a_warning_while_the_daemon_is_healthy(config: Path, daemon: FakeDaemon, typo: str) -> None:
    """Commands with a healthy daemon warn of the mistake with its line, and exit with 0."""
    config.write_text(config.read_text() + typo)
    daemon.answers["GET /v1/status"] = lambda _: (200, status_document())
    daemon.answers["POST /v1/snapshots"] = lambda _: (202, SnapshotState(id="cs-abc123", state="pending"))
    result = ciuic(config, "status")
    assert result.exit_code == 0, result.stderr
    assert "daemon     running" in result.stdout
    assert "the configuration is not valid" in result.stderr
    assert f"{config}:5" in result.stderr or f"{config}:6" in result.stderr
    assert json.loads(ciuic(config, "status", "--json").stdout)["pid"] == 77
    assert ciuic(config, "snapshot").stdout == "cs-abc123\n"


def test_a_typo_without_a_daemon_is_still_2(config: Path) -> None:
    """A mistake in the file exits with 2 without a daemon."""
    config.write_text(config.read_text() + "[schedule]\nintervall = 3\n")
    result = ciuic(config, "status")
    assert result.exit_code == 2
    assert "intervall" in result.stderr


def test_a_typo_does_not_hide_the_repository(config: Path, tmp_path: Path) -> None:
    """The refusal says how to read snapshots meanwhile, with the path from the valid part of the file."""
    config.write_text(config.read_text() + f'[repository]\npath = "{tmp_path}/store"\nblok_size = 3\n')
    result = ciuic(config, "list")
    assert result.exit_code == 2
    assert f"--repo {tmp_path}/store reads the repository without this file" in result.stderr


def test_a_file_of_others_names_no_socket(config: Path, daemon: FakeDaemon) -> None:
    """The socket of a file that other users may write is not connected to: they could answer there."""
    config.chmod(0o666)
    assert ciuic(config, "status").exit_code == 2
    assert daemon.requests == []


# Hints


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake a machine without systemd; a test makes the directories that say otherwise."""
    monkeypatch.setattr(service_manager, "BOOTED", str(tmp_path / "booted"))
    monkeypatch.setattr(service_manager, "UNIT_DIRS", (str(tmp_path / "units"),))
    return tmp_path


def test_no_hint_names_systemctl_where_systemd_does_not_run(machine: Path, config: Path) -> None:
    """Hints do not name systemctl where systemd does not run."""
    result = ciuic(config, "status")
    assert result.exit_code == 5
    assert "systemctl" not in result.stderr
    assert "ciuic daemon" in result.stderr
    for hint in (service_manager.start_hint(), service_manager.restart_hint(), service_manager.log_hint()):
        assert "systemctl" not in hint
        assert "journalctl" not in hint


def test_hints_name_the_unit_where_there_is_one(machine: Path) -> None:
    """The hint names the unit once it is installed, and its installation before."""
    (machine / "booted").mkdir()
    assert "ciuic service install" in service_manager.start_hint()
    (machine / "units").mkdir()
    (machine / "units/ciuic.service").touch()
    assert "systemctl start ciuic" in service_manager.start_hint()
    assert "journalctl -u ciuic" in service_manager.log_hint()


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/ciuic.service\n", "ciuic.service"),
        ("0::/system.slice/system-ciuic.slice/ciuic@b.service/x\n", "ciuic@b.service"),
        ("0::/user.slice/user-0.slice/user@0.service/app.slice/run-1.scope\n", None),
        ("0::/user.slice/user-0.slice/session-3.scope\n", None),
        ("0::/\n", None),
    ],
)
def test_the_unit_of_a_process(cgroup: str, unit: str | None) -> None:
    """A login session is not a service, though the user's systemd manager runs it."""
    assert service_manager.unit_of(cgroup) == unit
    assert service_manager.unit_of_process(os.getpid()) in ("", service_manager.unit_of_process("self"))
