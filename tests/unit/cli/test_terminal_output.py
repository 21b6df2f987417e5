"""Output on a terminal and elsewhere: tables, colour, progress."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import unicodedata
from pathlib import Path

import pytest
from support.cli_repository import CliRepository
from support.fake_daemon import FakeDaemon
from support.terminal import on_terminal

from ciuic.cli.shared.progress import _TerminalLine
from ciuic.protocol.control_types import Alert, RepositoryStatus, RootStatus, SnapshotSummary, StatusDocument


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot({b"[red]a": os.urandom(5000)}, tags=("[bold]nightly",))
    return made


def test_table_on_a_terminal_is_drawn_in_colour(repository: CliRepository) -> None:
    """The list on a terminal is a coloured table, and markup in names is text."""
    output = on_terminal(repository.path, "list")
    assert b"\x1b[" in output
    assert b"[bold]nightly" in output
    assert b"cs-000001" in output


def test_a_narrow_terminal_cuts_nothing(repository: CliRepository) -> None:
    """Ids and times are whole on a terminal too narrow for the table."""
    output = on_terminal(repository.path, "list", COLUMNS="50")
    assert b"cs-000001" in output
    assert b"committed" in output
    assert "…".encode() not in output


ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def lines_of(output: bytes) -> list[str]:
    return ANSI.sub("", output.decode()).replace("\r\n", "\n").splitlines()


def too_long(lines: list[str], width: int) -> list[str]:
    """Return lines that a terminal of this width would break, except those that are one indented word."""
    return [line for line in lines if len(line) > width and len(line.split()) > 2]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_list_fits_a_narrow_terminal(repository: CliRepository, width: int) -> None:
    """Lines are never longer than the terminal is wide, and every id, time and number is in one line."""
    repository.snapshot({b"b": os.urandom(123_456)}, tags=("a-rather-long-tag", "another"), message="m")
    lines = lines_of(on_terminal(repository.path, "list", COLUMNS=str(width)))
    assert too_long(lines, width) == []
    text = "\n".join(lines)
    for cell in ("cs-000001", "cs-000002", "2023-06-15 ", "121 KiB", "a-rather-long-tag", "committed"):
        assert cell in text


@pytest.mark.parametrize("width", [40, 60])
@pytest.mark.parametrize(
    "command", [["show", "latest"], ["verify", "latest", "--checksum"], ["check"]], ids="-".join
)
def test_facts_fit_a_narrow_terminal(repository: CliRepository, command: list[str], width: int) -> None:
    """Sentences among the facts are broken between words."""
    repository.snapshot({b"b": os.urandom(123_456)}, message="before the learning rate is changed " * 3)
    assert too_long(lines_of(on_terminal(repository.path, *command, COLUMNS=str(width))), width) == []


@pytest.mark.parametrize("width", [40, 60])
@pytest.mark.parametrize(
    ("command", "code"),
    [(["restore", "-s", "nosuch", "--all"], 2), (["list", "--sinec", "x"], 2), (["undo"], 3), (["remote", "status"], 3)],
)  # fmt: skip
def test_messages_fit_a_narrow_terminal(
    repository: CliRepository, command: list[str], code: int, width: int
) -> None:
    """Errors and their hints are broken between words."""
    lines = lines_of(on_terminal(repository.path, *command, code=code, COLUMNS=str(width)))
    assert lines
    assert too_long(lines, width) == []


@pytest.mark.parametrize("width", [40, 60])
def test_status_and_doctor_fit_a_narrow_terminal(
    repository: CliRepository, short_tmp: Path, width: int
) -> None:
    """Prose of status and doctor is broken between words, with further lines indented below the first."""
    config = short_tmp / "c.toml"
    config.write_text(f'[control]\nsocket = "{short_tmp}/s"\n')
    daemon = FakeDaemon(short_tmp / "s")
    summary = SnapshotSummary(id="cs-abcdef", time="2023-06-15T10:00:00+00:00", new_bytes=2048)
    root = RootStatus(path="/data/training", driver="kernel", state="mounted", dirty_bytes=3 << 20)
    alert = Alert(key="k", severity="problem", since="2023-06-15T10:00:00+00:00", message="a b " * 40)
    document = StatusDocument(
        version="1", pid=7, since="2023-06-15T10:00:00+00:00", now="", roots=[root], alerts=[alert],
        last_snapshot=summary, seconds_since_last=60, repository=RepositoryStatus(
            path="/a/rather/long/store", exists=True, total_bytes=1 << 40, reserve_bytes=1 << 30, reserve_reason="5% of it all"
        ),
    )  # fmt: skip
    daemon.answers["GET /v1/status"] = lambda _: (200, document)
    try:
        environment = {"CIUIC_CONFIG": str(config), "COLUMNS": str(width)}
        status = lines_of(on_terminal(repository.path, "status", **environment))
        doctor = lines_of(on_terminal(repository.path, "doctor", code=None, **environment))
    finally:
        daemon.stop()
    assert too_long(status, width) == []
    assert too_long(doctor, width) == []
    assert "/data/training" in status
    assert "3.00 MiB" in "\n".join(status)
    assert sum(line.startswith("           a b") for line in status) >= 1


def test_status_of_a_repository_that_is_gone_names_the_remedy(
    repository: CliRepository, short_tmp: Path
) -> None:
    """Status names the remedy for a repository that is gone, and does not say there was never a snapshot."""
    config = short_tmp / "c.toml"
    config.write_text(f'[control]\nsocket = "{short_tmp}/s"\n')
    daemon = FakeDaemon(short_tmp / "s")
    store = RepositoryStatus(
        path="/store", missing="/store was there and is gone", missing_hint="mount its disk"
    )
    document = StatusDocument(
        version="1", pid=7, since="2023-06-15T10:00:00+00:00", now="", repository=store
    )  # fmt: skip
    daemon.answers["GET /v1/status"] = lambda _: (200, document)
    try:
        text = "\n".join(lines_of(on_terminal(repository.path, "status", CIUIC_CONFIG=str(config))))
    finally:
        daemon.stop()
    assert "none yet" not in text
    assert "the repository is gone" in text
    assert "mount its disk" in text


def test_no_color_is_respected(repository: CliRepository) -> None:
    """Colours are off with NO_COLOR, on a terminal either."""
    for arguments in (["list"], ["show", "latest"], ["verify", "latest"], ["diff", "latest", "latest"]):
        assert b"\x1b[3" not in on_terminal(repository.path, *arguments, NO_COLOR="1"), arguments


def test_progress_as_json_lines(repository: CliRepository) -> None:
    """Progress with CIUIC_PROGRESS=json is JSON lines on stderr up to finished; stdout is the result."""
    result = repository.run("verify", "latest", "--checksum", "--json", env={"CIUIC_PROGRESS": "json"})
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert lines[-1]["task"] == "verify"
    assert lines[-1]["state"] == "finished"
    assert json.loads(result.stdout)["damaged"] is False


def test_no_progress_into_a_pipe(repository: CliRepository) -> None:
    """Progress is not written into a pipe."""
    assert repository.run("verify", "latest", "--checksum").stderr == ""


def test_progress_line_prefers_the_daemons_estimate() -> None:
    """The progress line prefers the daemon's estimate to a guess, and shows it alone for a waiting capture."""
    reporter = _TerminalLine("capture cs-1", 0.1)
    reporter.state = {"bytes_done": 50, "bytes_total": 100, "seconds_left": 90.0}
    assert reporter.line(elapsed_seconds=4.0).endswith("1m left")
    reporter.state = {"seconds_left": 7.0}
    assert reporter.line(elapsed_seconds=4.0) == "capture cs-1  7s left"


@pytest.mark.parametrize("name", [b"f" * 300, "モデル".encode() * 40, b"x"], ids=["long", "wide", "short"])
def test_progress_keeps_to_one_line_of_a_terminal_of_60_columns(
    monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    """On 60 columns the line never reaches the last one, and shows share, speed and time left whatever the name is."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal, os.fdopen(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        reporter = _TerminalLine("restore", 0.1)
        for done in (1, 999, 1000):
            reporter.state = {
                "bytes_done": done << 20,
                "bytes_total": 1000 << 20,
                "files_done": done * 100,
                "files_total": 100_000,
                "path": b"/data/" + name,
            }
            reporter.show(elapsed_seconds=3700.0)
            line = screen.read(65536).decode().removeprefix("\r\x1b[K")
            columns = sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in line)
            assert columns < 60, line
            assert "\n" not in line
            assert re.search(r"\d+%  .*B/s", line), line
            assert (" left" in line) == (done < 1000), line


def test_progress_without_a_terminal_writes_no_control_characters(
    repository: CliRepository, tmp_path: Path
) -> None:
    """Where stderr is no terminal nothing is rewritten in place: only whole lines are written, also as JSON."""
    for number, progress in enumerate(("", "json")):
        result = repository.run(
            *("restore", "-s", "latest", "--all", "-d", str(tmp_path / f"to{number}")),
            env={"CIUIC_PROGRESS": progress},
        )
        assert result.exit_code == 0, result.stderr
        assert "\r" not in result.stderr
        assert "\x1b" not in result.stderr
        assert result.stderr == "" or result.stderr.endswith("\n")


def test_progress_line_has_share_speed_and_time_left() -> None:
    """The progress line has share, sizes, speed and time left, and any name on one line."""
    reporter = _TerminalLine("restore", 0.1)
    reporter.state = {
        "bytes_done": 512 << 20,
        "bytes_total": 1 << 30,
        "files_done": 3,
        "files_total": 9,
        "path": b"a\nb",
    }
    line = reporter.line(elapsed_seconds=4.0)
    for text in ("restore", "50%", "512 MiB of 1.00 GiB", "3/9 files", "128 MiB/s", "4s left", "$'a\\nb'"):
        assert text in line
    assert line.isprintable()
