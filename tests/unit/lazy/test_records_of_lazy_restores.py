"""Records of lazy restores: another version of ciuic may go on with them, and what is told of those whose processes have ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from ciuic.cli.shared.lazy_restore import line_of
from ciuic.lazy.progress import LazyStatus, read_statuses
from ciuic.lazy.service import LazyRecord


@pytest.mark.parametrize("version", [1, 2])
def test_a_restore_that_goes_on_is_one_with_journals(version: int) -> None:
    """A record of the version without journals is taken over as one with them, which versions without them refuse."""
    data = json.loads(LazyRecord(snapshot="cs-000001", source="2f72", special=False).encode())
    data["version"] = version
    assert json.loads(LazyRecord.decode(json.dumps(data).encode()).encode())["version"] == 2


def test_a_record_of_a_later_version_is_refused() -> None:
    """A record that this version may not understand is not gone on with."""
    data = json.loads(LazyRecord(snapshot="cs-000001", source="2f72", special=False).encode())
    data["version"] = 3
    with pytest.raises(ValueError, match="must be 1 or 2, got 3"):
        LazyRecord.decode(json.dumps(data).encode())


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
