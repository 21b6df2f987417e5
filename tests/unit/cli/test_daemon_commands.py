"""The commands that talk to the daemon, against documents served by a small HTTP server, and waits that nobody would end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.fake_daemon import FakeDaemon

from ciuic import __version__
from ciuic.cli.app import cli
from ciuic.cli.commands import snapshot as command
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import (
    Alert,
    BesideStatus,
    BypassReport,
    ErrorDocument,
    Progress,
    RemoteStatus,
    RepositoryStatus,
    RootStatus,
    SnapshotState,
    SnapshotSummary,
    StatusDocument,
)


@pytest.fixture
def config(short_tmp: Path) -> Path:
    """Write a configuration whose daemon would listen beside it."""
    root = short_tmp / "root"
    root.mkdir()
    file = short_tmp / "c.toml"
    file.write_text(
        f'[repository]\npath = "{short_tmp}/repo"\n[control]\nsocket = "{short_tmp}/s"\n[[root]]\npath = "{root}"\n'
    )
    return file


@pytest.fixture
def daemon(config: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(config.with_name("s"))
    yield fake
    fake.stop()


def ciuic(config: Path, *arguments: str, **kwargs: Any) -> Result:
    return CliRunner().invoke(cli, ["--config", str(config), *arguments], **kwargs)


def status_document(**fields: Any) -> StatusDocument:
    base: dict[str, Any] = {"version": "9.9", "pid": 77, "since": "2023-06-15T10:00:00+00:00", "now": ""}
    return StatusDocument(**base | fields)


@pytest.mark.parametrize("command", [["status"], ["snapshot"], ["status", "--json"]])
def test_no_daemon_is_5(config: Path, command: list[str]) -> None:
    """The exit code without a daemon is 5, and the message names the socket and how to start one."""
    result = ciuic(config, *command)
    assert result.exit_code == 5
    assert str(config.with_name("s")) in result.stderr
    assert "ciuic daemon" in result.stderr


def test_no_daemon_json_is_one_document(config: Path) -> None:
    """`status --json` without a daemon is still one document, with the code in it."""
    document = json.loads(ciuic(config, "status", "--json").stdout)
    assert document["code"] == 5
    assert document["daemon"] is None


def test_status_shows_remotes(config: Path, daemon: FakeDaemon) -> None:
    """Status has a line for each remote: what it lacks, that it has everything, or why nothing is known."""
    document = status_document(
        remotes=[
            RemoteStatus(name="nas", snapshots=2, size_bytes=3 << 20, seconds=240, stored=5),
            RemoteStatus(name="late", snapshots=1, size_bytes=1 << 20, stored=5),
            RemoteStatus(name="done", stored=7),
            RemoteStatus(name="new", snapshots=7, seconds=9, problem="nothing was ever uploaded"),
        ]
    )
    daemon.answers["GET /v1/status"] = lambda _: (200, document)
    lines = ciuic(config, "status").stdout.splitlines()
    assert [line for line in lines if line.startswith("remote ")] == [
        "remote     nas: behind by 2 snapshots, about 3.00 MiB, 4m of work",
        "remote     late: behind by 1 snapshot, about 1.00 MiB",
        "remote     done: has everything",
        "remote     new: nothing was ever uploaded; ciuic remote status",
    ]


def test_status_shows_roots_snapshots_space_and_alerts(config: Path, daemon: FakeDaemon) -> None:
    """Status shows roots, last and next snapshot, work at risk, space, bypassing processes and alerts."""
    document = status_document(
        roots=[
            RootStatus(
                path="/data",
                driver="pyfuse3",
                state="mounted",
                dirty_bytes=3 << 20,
                bypassing=[BypassReport(pid=99, command="train\x1b[2J", paths=["/data/x"])],
            )
        ],
        repository=RepositoryStatus(
            path="/store",
            exists=True,
            size_bytes=1 << 30,
            free_bytes=5 << 30,
            total_bytes=10 << 30,
            snapshots=4,
        ),
        last_snapshot=SnapshotSummary(id="cs-abcdef", time="2023-06-15T10:00:00+00:00", new_bytes=2048),
        next_snapshot="2023-06-15T11:00:00+00:00",
        seconds_since_last=37 * 60,
        captures=[
            SnapshotState(
                id="cs-111111",
                state="capturing",
                progress=Progress(
                    bytes_done=50,
                    bytes_total=100,
                    share=0.01,
                    others_waiting=0.625,
                    others_writing=5 << 20,
                    paused_seconds=90,
                ),
                seconds_left=200,
            ),
            SnapshotState(id="cs-222222", state="pending", seconds_left=210),
            SnapshotState(id="cs-333333", state="capturing", progress=Progress(files_done=7)),
        ],
        beside=BesideStatus(
            io_priority="idle",
            slice="ciuic-capture.slice",
            min_share=0.01,
            finish_within_seconds=300,
            hears=["pressure", "requests"],
        ),
        alerts=[
            Alert(
                key="full",
                severity="problem",
                since="2023-06-15T10:00:00+00:00",
                message="store full",
                hint="prune",
            )
        ],
    )
    daemon.answers["GET /v1/status"] = lambda _: (200, document)
    result = ciuic(config, "status")
    assert result.exit_code == 0
    for text in (
        "version 9.9",
        f"this command is of version {__version__}",
        "/data",
        "pyfuse3",
        "mounted",
        "3.00 MiB",
        "cs-abcdef",
        "work at risk: 37m",
        "5.00 GiB of 10.0 GiB",
        "process 99",
        "cs-222222 pending, done in about 3m",
        "cs-333333 capturing, 7 names so far (how many there are is not known)",
        "cs-111111 capturing, 50% of 100 B, done in about 3m, slowed down to 1% of its time: others wait for the disk 62% of theirs and "
        "write 5.00 MiB/s (made way for 1m so far)",
        "I/O class idle, ciuic-capture.slice; making way for whoever waits for a disk, requests that wait in the "
        "overlay; 1% of the time at least, all of it 5m after a cut",
        "problem",
        "store full",
        "prune",
    ):
        assert text in result.stdout, text
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (BesideStatus(io_priority="none"), "I/O class none, no slice of systemd; making way for nobody"),
        (
            BesideStatus(io_priority="idle", min_share=0.05),
            "nothing to be heard of others here, so making way for nobody",
        ),
    ],
)
def test_status_says_when_captures_are_not_slowed(
    config: Path, daemon: FakeDaemon, status: BesideStatus, text: str
) -> None:
    """Status says that captures are not slowed, as configured or because the kernel has no figures."""
    daemon.answers["GET /v1/status"] = lambda _: (200, status_document(beside=status))
    assert text in ciuic(config, "status").stdout


def test_status_json_is_the_daemons_document(config: Path, daemon: FakeDaemon) -> None:
    """`status --json` prints exactly the answer of GET /v1/status."""
    document = status_document(seconds_since_last=1.5)
    daemon.answers["GET /v1/status"] = lambda _: (200, document)
    assert json.loads(ciuic(config, "status", "--json").stdout) == msgspec.to_builtins(document)


def test_snapshot_prints_the_id_alone(config: Path, daemon: FakeDaemon) -> None:
    """The id is alone on stdout, and message, tags and hold have reached the daemon."""
    daemon.answers["POST /v1/snapshots"] = lambda _: (202, SnapshotState(id="cs-abc123", state="pending"))
    result = ciuic(config, "snapshot", "-m", "before lr change", "--tag", "a", "--tag", "b", "--hold")
    assert (result.exit_code, result.stdout) == (0, "cs-abc123\n")
    ((_, body),) = daemon.requests
    assert (body["message"], body["tags"], body["hold"]) == ("before lr change", ["a", "b"], True)


def test_snapshot_wait_returns_when_committed(config: Path, daemon: FakeDaemon) -> None:
    """The id is printed with --wait once the daemon says committed, and not before."""
    daemon.answers["POST /v1/snapshots"] = lambda _: (202, SnapshotState(id="cs-abc123", state="pending"))
    daemon.answers["GET /v1/snapshots/cs-abc123?wait=1"] = lambda _: (
        200,
        SnapshotState(id="cs-abc123", state="committed"),
    )
    result = ciuic(config, "snapshot", "--wait")
    assert (result.exit_code, result.stdout) == (0, "cs-abc123\n")


def test_snapshot_wait_asks_for_progress_where_it_is_shown(
    config: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshot with progress shown asks the daemon for it repeatedly until the commit."""
    monkeypatch.setenv("CIUIC_PROGRESS", "json")
    daemon.answers["POST /v1/snapshots"] = lambda _: (202, SnapshotState(id="cs-abc123", state="pending"))
    states = iter(["capturing", "capturing", "committed"])
    daemon.answers["GET /v1/snapshots/cs-abc123"] = lambda _: (
        200,
        SnapshotState(id="cs-abc123", state=next(states)),  # type: ignore[arg-type]
    )
    result = ciuic(config, "snapshot", "--wait")
    assert (result.exit_code, result.stdout) == (0, "cs-abc123\n")
    assert next(states, "all asked for") == "all asked for"


def test_snapshot_that_fails_has_its_code(config: Path, daemon: FakeDaemon) -> None:
    """A capture that failed makes the command exit with the failure's code and print no id."""
    daemon.answers["POST /v1/snapshots"] = lambda _: (202, SnapshotState(id="cs-abc123", state="pending"))
    daemon.answers["GET /v1/snapshots/cs-abc123?wait=1"] = lambda _: (
        200,
        SnapshotState(id="cs-abc123", state="failed", error="store is damaged", hint="ciuic check", code=4),
    )
    result = ciuic(config, "snapshot", "--wait")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "store is damaged" in result.stderr
    assert "ciuic check" in result.stderr


def test_the_daemons_refusal_keeps_its_code(config: Path, daemon: FakeDaemon) -> None:
    """An error document of the daemon arrives as message, hint and exit code."""
    daemon.answers["POST /v1/snapshots"] = lambda _: (
        404,
        ErrorDocument(error="no root is protected", hint="ciuic protect PATH", code=3),
    )
    result = ciuic(config, "snapshot", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout) == {
        "error": "no root is protected",
        "hint": "ciuic protect PATH",
        "code": 3,
    }


@pytest.mark.parametrize("tag", ["", "a b", "a,b", "a|b", "a\n"])
def test_tags_that_lists_could_not_carry(config: Path, tag: str) -> None:
    """A tag with a blank, comma, bar or control character is wrong usage before the daemon is asked."""
    assert ciuic(config, "snapshot", "--tag", tag).exit_code == 2


def test_incomplete_snapshot_names_what_is_missing(config: Path, daemon: FakeDaemon) -> None:
    """An incomplete snapshot names what could not be read, and exits with 0."""
    daemon.answers["POST /v1/snapshots"] = lambda _: (
        202,
        SnapshotState(id="cs-abc123", state="committed", incomplete=["/data/bad: Input/output error"]),
    )
    result = ciuic(config, "snapshot")
    assert result.exit_code == 0
    assert re.search("incomplete.*\n.*Input/output error", result.stderr)
    document = json.loads(ciuic(config, "snapshot", "--json").stdout)
    assert document["is_incomplete"] is True
    assert document["incomplete"] == ["/data/bad: Input/output error"]


def test_protect_says_which_driver_serves(config: Path, daemon: FakeDaemon) -> None:
    """A driver other than the requested one is named, with the reason."""
    served = RootStatus(path="/x", driver="kernel", driver_why="pyfuse3 is not installed", state="mounted")
    daemon.answers["POST /v1/roots"] = lambda _: (200, served)
    daemon.answers["GET /v1/status"] = lambda _: (200, status_document(config_path=str(config)))
    new = config.with_name("another")
    new.mkdir()
    result = ciuic(config, "protect", "--driver", "pyfuse3", str(new))
    assert result.exit_code == 0, result.stderr
    assert "served by the kernel driver, not by pyfuse3" in result.stderr
    assert "pyfuse3 is not installed" in result.stderr


def test_unprotect_makes_the_daemon_unmount_the_root(config: Path, daemon: FakeDaemon) -> None:
    """unprotect removes the root from the configuration and makes the daemon unmount it."""
    daemon.answers["DELETE /v1/roots"] = lambda _: (200, {})
    root = config.with_name("root")
    result = ciuic(config, "unprotect", str(root))
    assert result.exit_code == 0, result.stderr
    assert daemon.requests == [("DELETE /v1/roots", {"path": str(root)})]
    assert str(root) not in config.read_text()
    assert root.is_dir()


def test_unprotect_of_no_root_changes_nothing(config: Path) -> None:
    """A path that is no root exits with 3, and the configuration stays byte for byte."""
    before = config.read_bytes()
    result = ciuic(config, "unprotect", str(config.with_name("root")), "/elsewhere")
    assert result.exit_code == 3
    assert "/elsewhere" in result.stderr
    assert config.read_bytes() == before


@pytest.mark.parametrize("status", [None, SimpleNamespace(runs=False)])
def test_waiting_ends_where_nothing_uploads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: Any
) -> None:
    """Without a process that uploads it is said soon, and the wait ends with what to start."""
    session = SimpleNamespace(
        config=SimpleNamespace(remotes=[SimpleNamespace(name="nas")]), repository=SimpleNamespace(id="r")
    )
    monkeypatch.setattr(command, "_is_stored", lambda *_: False)
    monkeypatch.setattr(command, "_upload_status", lambda _: status)
    for name in ("_PATIENCE_SECONDS", "_UNSERVED_SECONDS", "_POLL_SECONDS"):
        monkeypatch.setattr(command, name, 0.0)
    with pytest.raises(CiuicError, match="nothing uploads to the remote nas") as caught:
        command.RemoteWait(cast("Any", session)).until_stored("cs-abc123")
    assert "ciuic service install" in caught.value.hint
    assert "nothing seems to upload to the remote nas" in capsys.readouterr().err
