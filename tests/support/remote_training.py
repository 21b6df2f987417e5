"""Trainings with a remote, for tests: their processes, found by a mark in the environment, and an end to all.

A training with `SnapshotManager` runs as a process, in one directory or with a remote. CIUIC_RESCUE_STATES is the number of its steps; 0: the story does without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from support.until import until

from ciuic.protocol.stored_remotely import read_record
from ciuic.repository import Repository
from ciuic.training.remote.uploads import state_dir

_MARK = "CIUIC_REMOTE_TEST_MARK"
_SUPPORT = Path(__file__).parent
KEY = "2b" * 32
WAIT_SECONDS = 120


class RemoteHost:
    """A host with directories of its own, and the processes of its trainings."""

    def __init__(self, place: Path, variables: dict[str, str]) -> None:
        self.place = place
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            **variables,
            _MARK: self.mark,
            "XDG_STATE_HOME": str(place / "state"),
            "XDG_CACHE_HOME": str(place / "cache"),
            # One key for all hosts, in a file of each: a passphrase would take a second of every process.
            "CIUIC_REMOTE_KEY_FILE": str(place / "key"),
            # The code that lies beside the tests, also from another directory.
            "PYTHONPATH": f"{_SUPPORT.parents[1]}:{_SUPPORT.parent}",
        }
        place.mkdir(parents=True, exist_ok=True)
        (place / "key").write_text(KEY)
        (place / "key").chmod(0o600)

    def run(self, script: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, which must be good."""
        done = subprocess.run(
            self._command(script, *arguments),
            env=self.environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    def start(self, script: str | Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a program."""
        return subprocess.Popen(
            self._command(script, *arguments), env=self.environment, cwd="/", start_new_session=True
        )

    def kill(self, module: str = "") -> list[int]:
        """Kill the host's processes at once, or those that run a module; return their ids."""
        killed = []
        for pid in self.processes(module):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        until("the end of killed processes", lambda: not set(killed) & set(self.processes(module)))
        return killed

    def processes(self, module: str = "") -> list[int]:
        """Return the ids of the host's processes, or of those that run a module."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                ours = f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                if ours and module.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def _command(self, script: str | Path, *arguments: str) -> list[str]:
        program = ["-c", script] if isinstance(script, str) else [str(script)]
        return [sys.executable, *program, *arguments]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteHost]:
    """Provide a host whose environment this process has too; its processes are killed at the end."""
    made = RemoteHost(tmp_path / "host", {})
    for name in (_MARK, "XDG_STATE_HOME", "XDG_CACHE_HOME", "CIUIC_REMOTE_KEY_FILE"):
        monkeypatch.setenv(name, made.environment[name])
    yield made
    made.kill()


TRAINING = Path(__file__).with_name("tiny_training.py")
STATES_STEPS = int(os.environ.get("CIUIC_RESCUE_STATES", "150"))


def run_states(
    save_dir: str, result: Path, environment: Mapping[str, str], *, step_seconds: float = 0
) -> subprocess.Popen[bytes]:
    """Start the training of `tiny_training.py`, which resumes by itself; its messages are beside the result."""
    with open(f"{result}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, str(TRAINING), save_dir, str(STATES_STEPS), str(result), str(step_seconds)],
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def stored_states(save_dir: Path) -> frozenset[str]:
    """Return the snapshots that the remotes of a directory have."""
    remotes = save_dir / "remotes"
    if not remotes.is_dir() or not Repository.exists(save_dir):
        return frozenset()
    records = [read_record(one.name, state_dir(save_dir)) for one in remotes.iterdir()]
    return frozenset().union(*(record.stored for record in records if record is not None))
