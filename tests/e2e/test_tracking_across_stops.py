"""What the next snapshot compares after each way in which a daemon ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.live import Live

pytestmark = pytest.mark.mount


def _content(live: Live, snapshot: str, path: Path) -> bytes:
    return live.run("cat", snapshot, str(path)).stdout


def _names(live: Live, snapshot: str, root: Path) -> set[str]:
    lines = live.run("show", snapshot, str(root), "--json").stdout
    return {name for name in ("kept", "hidden", "removed", "new") if f'"{name}"'.encode() in lines}


@pytest.fixture
def tracked(protected: Live, root: Path) -> Live:
    """Provide a daemon that tracks a root with three files, of which the last snapshot has everything."""
    for name in ("kept", "hidden", "removed"):
        (root / name).write_bytes(b"old " + name.encode())
    protected.snapshot_until_tracking()
    return protected


def test_a_stop_ends_tracking(tracked: Live, root: Path) -> None:
    """The first snapshot after a stop compares every file: it has what was changed while nothing was mounted.

    No proof but that comparison covers the time in between: also a file whose size and modification time are as
    before may be another one.
    """
    (root / "kept").write_bytes(b"new kept")
    assert tracked.stop() == 0
    status = os.stat(root / "hidden")
    (root / "hidden").write_bytes(b"NEW hidden")
    os.utime(root / "hidden", ns=(status.st_atime_ns, status.st_mtime_ns))
    (root / "removed").unlink()
    (root / "new").write_bytes(b"made meanwhile")
    tracked.start(root)
    snapshot = tracked.snapshot()
    assert tracked.mode(snapshot) == "full"
    assert _names(tracked, snapshot, root) == {"kept", "hidden", "new"}
    assert _content(tracked, snapshot, root / "kept") == b"new kept"
    assert _content(tracked, snapshot, root / "hidden") == b"NEW hidden"
    assert _content(tracked, snapshot, root / "new") == b"made meanwhile"
    (root / "kept").write_bytes(b"kept on")
    snapshot = tracked.snapshot_until_tracking()
    assert _content(tracked, snapshot, root / "kept") == b"kept on"


def test_tracking_outlives_a_daemon_that_leaves_its_roots_mounted(tracked: Live, root: Path) -> None:
    """After a daemon that was killed, the next one's first snapshot reads changed files alone: no write was unseen."""
    assert tracked.stop(signal.SIGKILL) == -signal.SIGKILL
    (root / "kept").write_bytes(b"new kept")
    tracked.start(root)
    snapshot = tracked.snapshot()
    assert tracked.mode(snapshot) == "tracked" or tracked.events("tracking_has_gap")
    assert _content(tracked, snapshot, root / "kept") == b"new kept"
