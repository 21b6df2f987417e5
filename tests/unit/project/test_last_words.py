"""Tests that the report of a parallel run ends with what a worker was doing when it died."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.file_costs import CHECKOUT

_HANGS = """
import subprocess, threading
def wait_for_ever(): threading.Event().wait()
def test_it():
    # It ends with its standard input, when this process does.
    with subprocess.Popen(["cat", "-"], stdin=subprocess.PIPE):
        wait_for_ever()
"""
_CRASHES = """
import ctypes
def read_from_nowhere(): ctypes.string_at(0)
def test_it(): read_from_nowhere()
"""
_IS_KILLED = """
import os, signal
def test_it(): os.kill(os.getpid(), signal.SIGKILL)
"""
_CONFTEST = """
from support import last_words
def pytest_configure(config): last_words.register(config)
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (_HANGS, ["longer than its 1 s", "in wait_for_ever", "in test_it", " S ", "cat -"]),
        (_CRASHES, ["SIGSEGV", "Segmentation fault", "in read_from_nowhere"]),
        (_IS_KILLED, ["killed by SIGKILL"]),
    ],
    ids=["hangs", "crashes", "is-killed"],
)
def test_last_words_are_the_end_of_the_report(tmp_path: Path, program: str, words: list[str]) -> None:
    """The stacks of a worker that died, and its children where its time was up, come after everything else."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_dying.py").write_text(program + "\ndef test_sound(): pass\n")
    outcome = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n1",
            "-ra",
            "--timeout=1",
            "--timeout-method=thread",
            "-p",
            "no:randomly",
            "-p",
            "no:kmock",
        ],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join((str(CHECKOUT), str(CHECKOUT / "tests"))),
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    everything_else, _, end = outcome.stdout.partition("short test summary info")
    assert "crashed while running 'test_dying.py::test_it'" in everything_else, (
        outcome.stdout + outcome.stderr
    )
    _, title, last = end.partition("last words of gw0")
    assert title, outcome.stdout
    for expected in ["test_dying.py::test_it", *words]:
        assert expected in last, outcome.stdout
    # What called the test is no news.
    assert "pluggy" not in last
    assert "1 failed, 1 passed" in last
    assert list(tmp_path.glob("ciuic-last-words-*")) == []
