"""Tests that at most one worker serves a session, and that an old one delays no new mount."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ciuic.fuse_layer.journal.succession import SessionClaim, SessionServed

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
