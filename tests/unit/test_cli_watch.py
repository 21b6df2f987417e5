"""`ciuic watch -- COMMAND` without a daemon: the command must not notice that it is watched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.live import installed


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
    """What is sent to us reaches the command, whose mask is what it would be, and its exit status is ours."""
    process = watch(tmp_path, "--", sys.executable, "-c", _ANSWERS)
    assert process.stdout is not None
    assert process.stdout.readline() == b"[]\n"
    process.send_signal(number)
    said, complaint = process.communicate(timeout=60)
    assert said == f"{number.name}\n".encode()
    assert process.returncode == 7
    assert complaint.count(b"not watched yet: no daemon answers") == 1


def test_input_output_and_status_are_the_commands_own(tmp_path: Path) -> None:
    """Options behind its name are its own; a command killed by a signal ends us with 128 and the signal's number."""
    process = watch(tmp_path, "--name", "x", "sh", "-c", "cat; kill -9 $$")
    said, _ = process.communicate(b"hello", timeout=60)
    assert (said, process.returncode) == (b"hello", 128 + 9)


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
    ],
)
def test_what_cannot_be_watched_is_said(tmp_path: Path, words: list[str], code: int) -> None:
    """With the exit codes of every command."""
    process = watch(tmp_path, *words)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == code, complaint
