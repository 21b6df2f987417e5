"""The fast path of plain `ciuic snapshot` gives the same results as the whole program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_daemon import FakeDaemon, hang_up

from ciuic import types
from ciuic.cli.fast_snapshot import Request, find_socket, parse
from ciuic.cli.shared.snapshot_command import RESERVED_TAGS, telling_why
from ciuic.protocol.control_types import (
    ErrorDocument,
    Progress,
    SnapshotState,
    StatusDocument,
)

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
    """The fast path takes the forms of the command that scripts write."""
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
        ["--tag", "safety"],
        ["-m"],
        ["-m", "--wait"],
        ["-mtext"],
        ["--message=text"],
        ["extra"],
        ["--"],
    ],
)
def test_other_forms_are_left_to_the_whole_program(arguments: list[str]) -> None:
    """Other spellings, other options, help and mistakes are left to the whole program."""
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
    """The socket is found by key, runtime directory or default; mistakes are left to the whole program."""
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
    """Both paths send the same request and have the same stdout, stderr and exit status."""
    quick = _run(PROGRAM, config, "snapshot", *arguments)
    bodies = [body for key, body in daemon.requests if key.startswith("POST")]
    daemon.requests.clear()
    assert quick == _run(WHOLE_PROGRAM, config, "snapshot", *arguments)
    again = [body for key, body in daemon.requests if key.startswith("POST")]
    assert [{**body, "wait": False} for body in bodies] == again


def test_output_on_a_full_device_is_not_taken_for_a_full_repository(config: Path, daemon: FakeDaemon) -> None:
    """A failure to print the id on a full device is not called a full repository: the snapshot is there."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ciuic", "snapshot"],
            stdout=full, stderr=subprocess.PIPE, env={**os.environ, "CIUIC_CONFIG": str(config)}, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert b"the output could not be written" in done.stderr
    assert b"prune" not in done.stderr


def test_both_paths_warn_of_an_incomplete_snapshot(config: Path, daemon: FakeDaemon) -> None:
    """Both paths warn of an incomplete snapshot."""
    state = SnapshotState(id="cs-abc123", state="committed", incomplete=["/data/x: Input/output error"])
    daemon.answers["POST /v1/snapshots"] = lambda _: (202, state)
    quick = _run(PROGRAM, config, "snapshot")
    assert b"/data/x" in quick[2]
    assert quick == _run(WHOLE_PROGRAM, config, "snapshot")


def test_both_paths_print_a_refusal(config: Path, daemon: FakeDaemon) -> None:
    """Both paths print the daemon's error with its hint and exit with its code."""
    daemon.answers["POST /v1/snapshots"] = lambda _: (
        503,
        ErrorDocument(error="too many", hint="wait", code=75),
    )
    quick = _run(PROGRAM, config, "snapshot", "--wait")
    assert (quick[0], b"too many" in quick[2]) == (75, True)
    assert quick == _run(WHOLE_PROGRAM, config, "snapshot", "--wait")


def test_both_paths_fail_alike_without_a_daemon(config: Path) -> None:
    """Both paths exit with 5 without a daemon, and print the socket and what to do."""
    quick = _run(PROGRAM, config, "snapshot", "--wait")
    assert quick[0] == 5
    assert quick == _run(WHOLE_PROGRAM, config, "snapshot", "--wait")


def test_a_daemon_that_goes_away_is_unreachable(config: Path, daemon: FakeDaemon) -> None:
    """A daemon that closes the connection without an answer is unreachable, not a success."""
    daemon.answers["POST /v1/snapshots"] = hang_up
    status, output, complaint = _run(PROGRAM, config, "snapshot", "--wait")
    assert (status, output) == (5, b"")
    assert b"did not answer" in complaint


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_wait(config: Path, daemon: FakeDaemon, number: signal.Signals) -> None:
    """A signal during the wait exits with 130 and says what becomes of the snapshot."""
    requested, end = threading.Event(), threading.Event()

    def wait(_: object) -> tuple[int, SnapshotState]:
        requested.set()
        end.wait(30)
        return 200, COMMITTED

    daemon.answers["POST /v1/snapshots"] = wait
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "snapshot", "--wait"],
        env={**os.environ, "CIUIC_CONFIG": str(config)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Under nohup, or in the background of a shell, SIGINT is rightly ignored.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        assert requested.wait(30)
        process.send_signal(number)
        output, complaint = process.communicate(timeout=30)
    end.set()
    assert (process.returncode, output) == (130, b"")
    assert b"goes on" in complaint
    assert b"Traceback" not in complaint


def test_the_shorter_way_imports_no_command_line(config: Path, daemon: FakeDaemon) -> None:
    """The fast path does not import the command line, which is what makes it fast."""
    program = (
        "import os, sys; from ciuic.cli import fast_snapshot\n"
        "assert fast_snapshot.run(['snapshot', '--wait'], os.environ) == 0\n"
        "print([m for m in ('click', 'msgspec', 'ciuic.config', 'ciuic.types', 'ciuic.system.service_manager', 'http.client',"
        " 'ctypes', 'dataclasses', 'pathlib', 'subprocess') if m in sys.modules])"
    )
    assert _run(program, config)[1] == b"cs-abc123\n[]\n"


@contextmanager
def closed_pipe() -> Iterator[int]:
    """Make a pipe whose reader has left."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    yield write_end
    os.close(write_end)


@pytest.mark.parametrize("program", [PROGRAM, WHOLE_PROGRAM])
@pytest.mark.parametrize("arguments", [[], ["--wait"]])
def test_reader_that_left_changes_neither_messages_nor_exit_code(
    config: Path, daemon: FakeDaemon, program: str, arguments: list[str]
) -> None:
    """`ciuic snapshot | true` prints the notes and warnings, and exits with the code, that it has without the pipe."""
    state = SnapshotState(
        id="cs-abc123",
        state="committed",
        incomplete=["/data/x: Input/output error"],
        left_out={"/other": "its disk is full"},
        time="2023-06-15T15:00:00+02:00",
    )
    daemon.answers["POST /v1/snapshots"] = lambda _: (202, state)
    daemon.answers["GET /v1/snapshots/cs-abc123?wait=1"] = lambda _: (200, state)
    status, _, complaint = _run(program, config, "snapshot", *arguments)
    assert b"/data/x" in complaint
    environment = {**os.environ, "CIUIC_CONFIG": str(config)}
    command = [sys.executable, "-c", program, "snapshot", *arguments]
    with closed_pipe() as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, env=environment, timeout=60)
        assert (done.returncode, done.stderr) == (status, complaint)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=gone, env=environment, timeout=60)
        assert (done.returncode, done.stdout) == (status, b"cs-abc123\n")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, env=environment, timeout=60)
        assert (done.returncode, done.stdout) == (status, b"cs-abc123\n")


def test_the_reserved_tags_are_those_of_the_library() -> None:
    """The fast path and the whole program refuse every tag that ciuic gives snapshots itself."""
    known = {value for name, value in vars(types).items() if name.startswith("TAG_")}
    assert known == RESERVED_TAGS


def test_a_long_wait_says_why(config: Path, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    """A wait that lasts because the capture makes way for other programs says so in one line; otherwise nothing is said."""
    for share, said in ((0.05, "5% of the time"), (1.0, "")):
        asked = threading.Event()
        # The time limit of this test is a timer as well.
        others = set(threading.enumerate())
        state = SnapshotState(id="cs-abc123", state="capturing", progress=Progress(share=share))

        def answer(_: object, state: SnapshotState = state, asked: threading.Event = asked) -> Any:
            asked.set()
            return 200, StatusDocument(pid=1, since="", now="", version="0", captures=[state])

        daemon.answers["GET /v1/status"] = answer
        with telling_why(str(config.with_name("s")), after_seconds=0):
            assert asked.wait(30)
            for thread in set(threading.enumerate()) - others:
                if isinstance(thread, threading.Timer):
                    thread.join(30)
        complaint = capsys.readouterr().err
        assert said in complaint
        assert complaint.count("\n") == bool(said)
