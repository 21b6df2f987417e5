"""`ciuic snapshot` in its plain forms goes a shorter way, and nobody can tell: except that it takes half the time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_http_daemon import FakeDaemon, hang_up

from ciuic.cli.quick import Request, find_socket, parse
from ciuic.control_types import ErrorDocument, SnapshotState

PROGRAM = "import sys; from ciuic.cli import main; sys.argv[0] = 'ciuic'; main()"
WHOLE_PROGRAM = "import sys; from ciuic.cli.app import run; sys.argv[0] = 'ciuic'; run()"
COMMITTED = SnapshotState(id="cs-abc123", state="committed")


@pytest.fixture
def config(short_tmp: Path) -> Path:
    file = short_tmp / "c.toml"
    file.write_text(f'[control]\nsocket = "{short_tmp}/s"\n')
    return file


@pytest.fixture
def daemon(config: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(config.with_name("s"))
    fake.answers["POST /v1/snapshots"] = lambda _: (202, COMMITTED)
    fake.answers["GET /v1/snapshots/cs-abc123?wait=1"] = lambda _: (200, COMMITTED)
    yield fake
    fake.stop()


def _run(program: str, config: Path, *arguments: str, **more: Any) -> tuple[int, bytes, bytes]:
    environment = {**os.environ, "CIUIC_CONFIG": str(config)}
    environment.pop("CIUIC_PROGRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, timeout=60, **more
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Request()),
        (["--wait"], Request(wait=True)),
        (["--hold", "--wait"], Request(wait=True, hold=True)),
        (["-m", "before lr change"], Request(message="before lr change")),
        (["--message", "ü", "--tag", "a-1", "--tag", "b_2"], Request(message="ü", tags=("a-1", "b_2"))),
    ],
)
def test_plain_forms_are_understood(arguments: list[str], expected: Request) -> None:
    """What scripts write."""
    assert parse(["snapshot", *arguments]) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json"],
        ["--help"],
        ["-h"],
        ["-q"],
        ["--repo", "/r"],
        ["--config", "/c"],
        ["--wai"],
        ["--tag"],
        ["--tag", ""],
        ["--tag", "a b"],
        ["--tag", "a,b"],
        ["-m"],
        ["-m", "--wait"],
        ["-mtext"],
        ["--message=text"],
        ["extra"],
        ["--"],
    ],
)
def test_everything_else_is_for_the_whole_program(arguments: list[str]) -> None:
    """Other spellings, other options, help and mistakes."""
    assert parse(["snapshot", *arguments]) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[control]\nsocket = "/a/b"', "/a/b"),
        ('[daemon]\nruntime_dir = "/run/x"', "/run/x/control.sock"),
        ('[daemon]\nruntime_dir = "/run/x"\n[control]\nsocket = "/s"', "/s"),
        ("", "/run/ciuic/control.sock"),
        ("[control]\nsocket = 3", None),
        ('[control]\nsocket = "relative"', None),
        ("control = 3", None),
        ("[daemon]\nruntime_dir = 3", None),
        ("not TOML", None),
        ("\udcff", None),
    ],
)
def test_the_socket_is_where_the_configuration_says(tmp_path: Path, text: str, expected: str | None) -> None:
    """In its own key, in the runtime directory, at the default; a file that cannot be meant is the whole program's."""
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert find_socket({"CIUIC_CONFIG": str(file)}) == expected
    assert find_socket({"CIUIC_CONFIG": str(file.with_suffix(".conf"))}) is None
    assert find_socket({"CIUIC_CONFIG": str(tmp_path / "missing.toml")}) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--wait"],
        [],
        ["-m", "ü", "--tag", "a", "--hold"],
        ["-m", os.fsdecode(b"\xff")],
        ["--nonsense"],
        ["--json"],
    ],
)
def test_both_ways_print_and_ask_the_same(config: Path, daemon: FakeDaemon, arguments: list[str]) -> None:
    """Standard output, standard error and exit status of the shorter way are the longer one's; so is what is asked for."""
    quick = _run(PROGRAM, config, "snapshot", *arguments)
    asked = [body for key, body in daemon.requests if key.startswith("POST")]
    daemon.requests.clear()
    assert quick == _run(WHOLE_PROGRAM, config, "snapshot", *arguments)
    again = [body for key, body in daemon.requests if key.startswith("POST")]
    assert [{**body, "wait": False} for body in asked] == again


def test_what_could_not_be_read_is_said_by_both(config: Path, daemon: FakeDaemon) -> None:
    """An incomplete snapshot is warned of."""
    state = SnapshotState(id="cs-abc123", state="committed", incomplete=["/data/x: Input/output error"])
    daemon.answers["POST /v1/snapshots"] = lambda _: (202, state)
    quick = _run(PROGRAM, config, "snapshot")
    assert b"/data/x" in quick[2]
    assert quick == _run(WHOLE_PROGRAM, config, "snapshot")


def test_a_refusal_is_said_by_both(config: Path, daemon: FakeDaemon) -> None:
    """The daemon's error with its hint and its exit code."""
    daemon.answers["POST /v1/snapshots"] = lambda _: (
        503,
        ErrorDocument(error="too many", hint="wait", code=75),
    )
    quick = _run(PROGRAM, config, "snapshot", "--wait")
    assert (quick[0], b"too many" in quick[2]) == (75, True)
    assert quick == _run(WHOLE_PROGRAM, config, "snapshot", "--wait")


def test_without_a_daemon_both_say_so(config: Path) -> None:
    """Exit code 5, the socket and what to do."""
    quick = _run(PROGRAM, config, "snapshot", "--wait")
    assert quick[0] == 5
    assert quick == _run(WHOLE_PROGRAM, config, "snapshot", "--wait")


def test_a_daemon_that_goes_away_is_unreachable(config: Path, daemon: FakeDaemon) -> None:
    """An answer that does not come is no success."""
    daemon.answers["POST /v1/snapshots"] = hang_up
    status, said, complaint = _run(PROGRAM, config, "snapshot", "--wait")
    assert (status, said) == (5, b"")
    assert b"did not answer" in complaint


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_wait(config: Path, daemon: FakeDaemon, number: signal.Signals) -> None:
    """Code 130, and what becomes of the snapshot."""
    asked, end = threading.Event(), threading.Event()

    def wait(_: object) -> tuple[int, SnapshotState]:
        asked.set()
        end.wait(30)
        return 200, COMMITTED

    daemon.answers["POST /v1/snapshots"] = wait
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "snapshot", "--wait"],
        env={**os.environ, "CIUIC_CONFIG": str(config)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Under nohup, or in the background of a shell, it is ignored, and rightly.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        assert asked.wait(30)
        process.send_signal(number)
        said, complaint = process.communicate(timeout=30)
    end.set()
    assert (process.returncode, said) == (130, b"")
    assert b"goes on" in complaint
    assert b"Traceback" not in complaint


def test_the_shorter_way_imports_no_command_line(config: Path, daemon: FakeDaemon) -> None:
    """Else it would not be shorter."""
    program = (
        "import os, sys; from ciuic.cli import quick\n"
        "assert quick.run(['snapshot', '--wait'], os.environ) == 0\n"
        "print([m for m in ('click', 'msgspec', 'ciuic.config', 'http.client', 'pathlib') if m in sys.modules])"
    )
    assert _run(program, config)[1] == b"cs-abc123\n[]\n"
