"""Tests of successors: one worker at most serves a session, and when one is started and when no more."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ciuic.fuse_layer.journal.succession import (
    STABLE_SECONDS,
    SUCCESSION_SECONDS,
    SessionClaim,
    SessionServed,
    counted_deaths,
    pause_seconds,
)

_HOLD = "import sys; from pathlib import Path; from ciuic.fuse_layer.journal.succession import SessionClaim; claim = SessionClaim.begin(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_a_session_that_is_served_is_not_taken_over(tmp_path: Path) -> None:
    """The claim of a session is refused while its worker lives, and free with its end."""
    path = tmp_path / "claim"
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(SessionServed):
        SessionClaim.inherit(path)
    process.kill()
    process.communicate()
    SessionClaim.inherit(path).release()
    assert not path.exists()


def test_a_worker_that_still_serves_open_files_keeps_no_new_mount_waiting(tmp_path: Path) -> None:
    """A new session has its own claim, so a worker that serves files of the old one does not delay it."""
    path = tmp_path / "claim"
    old = SessionClaim.begin(path)
    new = SessionClaim.begin(path)
    old.release()
    assert path.exists()
    with pytest.raises(SessionServed):
        SessionClaim.inherit(path)
    new.release()
    assert not path.exists()


def test_a_runtime_directory_that_cannot_be_written_costs_the_claim_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime directory that cannot be written costs only the claim, as serving the job matters more."""

    def full(*arguments: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    SessionClaim.begin(tmp_path / "claim").release()
    SessionClaim.inherit(tmp_path / "claim").release()


def test_a_sigkill_does_not_count_as_a_failure_of_the_worker() -> None:
    """SIGKILL leaves the count of failures as it is; a crash, an error and an unknown end raise it."""
    assert counted_deaths(3, -signal.SIGKILL, 0.1) == 3
    assert [counted_deaths(3, status, 0.1) for status in (-signal.SIGSEGV, 1, None)] == [4, 4, 4]


def test_a_long_life_ends_the_row() -> None:
    """A death after a long life counts as the first again."""
    assert counted_deaths(7, 1, STABLE_SECONDS) == 1
    assert counted_deaths(7, -signal.SIGKILL, STABLE_SECONDS) == 0


def test_pauses_grow_until_the_session_is_given_up() -> None:
    """The first restarts are immediate, as the job waits; then pauses grow until the session is given up."""
    pauses = [pause_seconds(deaths) for deaths in range(len(SUCCESSION_SECONDS) + 2)]
    assert pauses[:3] == [0.0, 0.0, 0.0]
    assert pauses[1:-1] == list(SUCCESSION_SECONDS)
    assert pauses[-1] is None
