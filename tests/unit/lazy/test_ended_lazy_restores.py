"""What is told of lazy restores whose processes have ended."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ciuic.cli.shared.lazy_restore import line_of
from ciuic.lazy.progress import LazyStatus, read_statuses


def test_a_zombie_is_an_interrupted_restore(tmp_path: Path) -> None:
    """A process that has ended and that its parent has not waited for fills nothing; the line says what to do."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        for pid, state in ((child, "interrupted"), (os.getpid(), "filling")):
            status = LazyStatus("/d", "cs-000001", "/s", pid, state="filling")
            (tmp_path / "one.json").write_bytes(msgspec.json.encode(status))
            (found,) = read_statuses(tmp_path)
            assert found.state == state
            assert ("run the same restore --lazy again" in line_of(found)) == (state == "interrupted")
    finally:
        os.waitpid(child, 0)
