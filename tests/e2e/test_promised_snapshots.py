"""Promised snapshots: one whose id was returned is committed under it, or listed as lost with the reason."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.live import Live, installed
from support.until import until

from ciuic.repository.model import LOCK_NAME

pytestmark = pytest.mark.mount

FILES = 150
FILE_BYTES = 40_000


def _fill(root: Path, seed: int) -> dict[str, bytes]:
    """Give a capture work for some tenths of a second; return the content."""
    rng = random.Random(seed)
    content = {f"file{number}": rng.randbytes(FILE_BYTES) for number in range(FILES)}
    for name, data in content.items():
        (root / name).write_bytes(data)
    return content


def _kill_worker(live: Live) -> None:
    status = live.status()
    assert status is not None
    with suppress(ProcessLookupError):
        os.kill(int(status["roots"][0]["worker_pid"]), signal.SIGKILL)


def _kill_capture(live: Live) -> None:
    for pid, command in live.processes().items():
        if "-m ciuic.daemon.capture.process " in command:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _kill_daemon(live: Live) -> None:
    assert live.daemon is not None
    live.daemon.kill()
    live.daemon.wait()


def _kill_daemon_and_worker(live: Live) -> None:
    status = live.status()
    assert status is not None
    _kill_daemon(live)
    with suppress(ProcessLookupError):
        os.kill(int(status["roots"][0]["worker_pid"]), signal.SIGKILL)


def _listed(live: Live, snapshot: str) -> str:
    """Return the snapshot's state in `list`, or an empty text while it is not listed."""
    document = live.json("list")
    return next(
        (row["state"] for row in document["snapshots"] + document["lost"] if row["id"] == snapshot), ""
    )


KILLS = 4 * [_kill_worker] + 2 * [_kill_capture] + 2 * [_kill_daemon] + 2 * [_kill_daemon_and_worker]


def test_a_promised_snapshot_is_delivered(protected: Live, root: Path, short_tmp: Path) -> None:
    """A snapshot whose id was returned shows the promised instant after a kill of any process at a random instant.

    With every process that held its sealed epoch killed it may be lost, and says why.
    """
    rng = random.Random(5)
    for number, kill in enumerate(KILLS):
        promised = _fill(root, number)
        snapshot = protected.run("snapshot", "--tag", "promised").stdout.decode().strip()
        for name in ("file0", "new"):
            (root / name).write_bytes(b"changed")
        time.sleep(rng.random() * 0.3)
        kill(protected)
        assert protected.daemon is not None
        if protected.daemon.poll() is not None:
            protected.start(root)
        (root / "file1").unlink()
        until(f"{snapshot} in the list", lambda snapshot=snapshot: _listed(protected, snapshot))
        if _listed(protected, snapshot) == "lost":
            assert kill in (_kill_worker, _kill_daemon_and_worker)
            assert b"was lost: the overlay session of" in protected.run("show", snapshot, expect=3).stderr
        else:
            into = short_tmp / f"out{number}"
            protected.run("restore", "-s", snapshot, "-p", str(root), "-d", str(into))
            assert {path.name: path.read_bytes() for path in (into / root.name).iterdir()} == promised
        if (root / "new").exists():
            (root / "new").unlink()


def test_a_snapshot_lost_by_a_stop_is_listed(protected: Live, root: Path) -> None:
    """A snapshot lost by stopping the daemon is reported to its caller and listed by the next daemon."""
    _fill(root, 0)
    until("the first snapshot", protected.list)
    # The capture waits for this lock until the daemon stops.
    with open(protected.repository / LOCK_NAME) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        snapshot = protected.run("snapshot", "--tag", "t").stdout.decode().strip()
        waiting = subprocess.Popen(
            [str(installed()), "snapshot", "--wait"],
            env=protected.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        until("the second cut", lambda: len(protected.json("status")["captures"]) > 1)
        protected.stop()
    complaint = waiting.communicate(timeout=60)[1]
    assert waiting.returncode == 1
    assert b"failed: the daemon stopped before it was captured" in complaint
    protected.start(root)
    second, lost = protected.json("list")["lost"]
    assert second["id"] != snapshot
    assert (lost["id"], lost["state"], lost["tags"]) == (snapshot, "lost", ["t"])
    assert "stopped" in lost["reason"]
    assert snapshot not in [line.id for line in protected.list()]
    refused = protected.run("restore", "-s", snapshot, "-p", str(root), expect=3)
    assert b"was lost: the daemon stopped before it was captured" in refused.stderr
    protected.run("forget", "-y", snapshot, second["id"])
    assert protected.json("list")["lost"] == []


def test_a_snapshot_lost_with_its_worker_is_reported(live: Live, root: Path) -> None:
    """Where no session outlives the worker, a snapshot that was cut and not captured is lost: its waiter gets the reason, and nothing is cut again under its id."""
    live.run("protect", "--driver", "pyfuse3", str(root))
    live.start(root)
    until("the first snapshot", live.list)
    _fill(root, 0)
    with open(live.repository / LOCK_NAME) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            [str(installed()), "snapshot", "--wait"],
            env=live.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        until("the cut", lambda: live.json("status")["captures"])
        _kill_worker(live)
        complaint = waiting.communicate(timeout=60)[1]
    assert waiting.returncode == 1
    assert f"the overlay session of {root} ended before the capture did".encode() in complaint
    (lost,) = live.json("list")["lost"]
    assert lost["reason"] == f"the overlay session of {root} ended before the capture did"
    live.run("snapshot", "--wait")
