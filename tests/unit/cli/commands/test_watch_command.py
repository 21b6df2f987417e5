"""`ciuic watch -- COMMAND` without a daemon: the command does not notice that it is watched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.live import installed
from support.served_sockets import RegistrationListener

from ciuic.protocol.watch_client import (
    MAX_TEXT_CHARACTERS,
    Hello,
)


def watch(tmp_path: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CIUIC_CONFIG": str(tmp_path / "ciuic.toml")}
    (tmp_path / "ciuic.toml").write_text(f'[daemon]\nruntime_dir = "{tmp_path}/none"\n')
    return subprocess.Popen(
        [str(installed()), "watch", *words], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip


_ANSWERS = """
import signal, sys
def told(number, frame):
    print(signal.Signals(number).name, flush=True)
    sys.exit(7)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, told)
print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_the_commands_own(tmp_path: Path, number: signal.Signals) -> None:
    """Signals sent to watch reach the command, which has the original mask; watch exits with its status."""
    process = watch(tmp_path, "--", sys.executable, "-c", _ANSWERS)
    assert process.stdout is not None
    assert process.stdout.readline() == b"[]\n"
    process.send_signal(number)
    output, complaint = process.communicate(timeout=60)
    assert output == f"{number.name}\n".encode()
    assert process.returncode == 7
    assert complaint.count(b"not watched yet: no daemon answers") == 1


def test_input_output_and_status_are_the_commands_own(tmp_path: Path) -> None:
    """Options after the command are its own; death by a signal gives 128 plus the signal's number."""
    process = watch(tmp_path, "--name", "x", "sh", "-c", "cat; kill -9 $$")
    output, _ = process.communicate(b"hello", timeout=60)
    assert (output, process.returncode) == (b"hello", 128 + 9)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--", "/nowhere/train"], 3),
        (["--pid", str(1 << 22)], 3),
        ([], 2),
        (["--pid", "5", "--forget", "x"], 2),
        (["--heartbeat", "5s", "--", "true"], 2),
        (["--heartbeat", "5", "--heartbeat-file", "f", "--", "true"], 2),
        (["--forget", "x"], 5),
        (["--restart-hung", "5m", "--pid", "5"], 2),
        (["--restart-hung", "5", "--", "true"], 2),
        (["--restart-hung", "5m", "--heartbeat", "5m", "--heartbeat-file", "f", "--", "true"], 2),
    ],
)
def test_command_that_cannot_run_is_an_error(tmp_path: Path, words: list[str], code: int) -> None:
    """A command that cannot be run is reported with the exit code used by every command."""
    process = watch(tmp_path, *words)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == code, complaint


def _told(directory: Path, tmp_path: Path, *words: str) -> tuple[int, Hello, bytes]:
    """Run watch in ``directory`` beside a daemon that accepts one trainer; return status, message and stderr."""
    (tmp_path / "ciuic.toml").write_text(f'[daemon]\nruntime_dir = "{tmp_path}"\n')
    environment = {**os.environ, "CIUIC_CONFIG": str(tmp_path / "ciuic.toml")}
    with RegistrationListener(tmp_path) as daemon:
        process = subprocess.Popen(
            # Removed by the shell that is in it, so that watch starts in a directory that is no more.
            ["sh", "-c", '[ -z "$GONE" ] || rmdir "$PWD"; exec "$@"', "sh", str(installed()), "watch", *words],
            cwd=directory, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        with process, daemon.accept() as (hello, _):
            _, complaint = process.communicate(timeout=60)
    return process.returncode, hello, complaint


def test_command_is_watched_in_a_directory_that_was_removed(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is started in a removed directory is watched, and its status is returned."""
    (short_tmp / "gone").mkdir()
    monkeypatch.setenv("GONE", "1")
    status, hello, complaint = _told(short_tmp / "gone", short_tmp, "--", "sh", "-c", "exit 7")
    assert status == 7, complaint
    assert hello.name == "sh"
    assert hello.where.startswith(str(short_tmp / "gone"))


@pytest.mark.parametrize("pid", [False, True])
def test_long_directory_and_name_are_cut(short_tmp: Path, pid: bool) -> None:
    """The end of a path, and the beginning of a name, that are longer than the daemon accepts are sent to it."""
    directory = short_tmp.joinpath(*["d" * 200] * 3, "last")
    directory.mkdir(parents=True)
    with subprocess.Popen(["sleep", "300"], cwd=directory) as sleeper:
        words = ["--pid", str(sleeper.pid)] if pid else ["--", "sh", "-c", "exit 7"]
        try:
            status, hello, complaint = _told(directory, short_tmp, "--name", "n" * 500, *words)
        finally:
            sleeper.kill()
    assert status == (0 if pid else 7), complaint
    assert b"not watched" not in complaint
    assert hello.name == "n" * MAX_TEXT_CHARACTERS
    assert hello.where == str(directory)[-MAX_TEXT_CHARACTERS:]
