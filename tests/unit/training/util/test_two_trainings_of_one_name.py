"""Detection of two trainings under one name."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ciuic import SnapshotManager

_OTHER = """
import sys
from ciuic import SnapshotManager
manager = SnapshotManager(sys.argv[1], name=sys.argv[2])
manager.register(counts={"a": 1})
manager.save_snapshot(epoch=1, wait=True)
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("name", "is_warned"), [("training", True), ("another", False)])
def test_a_name_used_by_another_process_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_warned: bool
) -> None:
    """Saving and resuming warn while another process with the name lives; managers of one process do not."""
    where = tmp_path / "snapshots"
    with SnapshotManager(where) as first, SnapshotManager(where) as second:
        _save(first, 1)
        _save(second, 2)
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(where), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other, caplog.at_level(logging.WARNING, "ciuic"):
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        assert not _is_warned(caplog)
        with SnapshotManager(where) as saving:
            _save(saving, 3)
        assert _is_warned(caplog) == is_warned
        assert (f"({other.pid})" in caplog.text) == is_warned
        caplog.clear()
        with SnapshotManager(where) as resuming:
            resuming.register(counts={"a": 2})
            assert resuming.resume() is not None
        assert _is_warned(caplog) == is_warned
        other.kill()
        other.wait()
        caplog.clear()
        with SnapshotManager(where) as last:
            _save(last, 4)
        assert not _is_warned(caplog)


def _save(manager: SnapshotManager, epoch: int) -> None:
    manager.register(counts={"a": 1})
    manager.save_snapshot(epoch=epoch, wait=True)


def _is_warned(caplog: pytest.LogCaptureFixture) -> bool:
    return any("another process" in record.getMessage() for record in caplog.records)
