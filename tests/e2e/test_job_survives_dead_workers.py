"""Workers die and are renewed under an unaffected job: the kernel driver's sessions outlive them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import surviving_job
from support.injection import keeper_pids
from support.site import Site, ended
from support.site import kernel_site as kernel_site
from support.until import until

from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.protocol.worker_client import WorkerControlClient

pytestmark = pytest.mark.mount


@contextmanager
def jobs(root: Path, count: int, stop: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Run jobs below ``root``; assert at the end that each has done rounds without a single error."""
    command = [sys.executable, surviving_job.__file__, str(root)]
    started = [
        subprocess.Popen([*command, str(number), str(stop)], stdout=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    try:
        yield started
        stop.touch()
        outputs = [job.communicate(timeout=60)[0] for job in started]
    finally:
        for job in started:
            job.kill()
    for job, output in zip(started, outputs, strict=True):
        assert job.returncode == 0
        assert json.loads(output)["rounds"] >= 1


def kill_worker(site: Site, root: Path) -> None:
    """Send SIGKILL to the worker; return when a successor serves."""
    before = site.root_status(root)
    os.kill(before.worker_pid, signal.SIGKILL)
    until("a successor", lambda: _served_by_another(site, root, before.worker_pid))


def _served_by_another(site: Site, root: Path, pid: int) -> bool:
    now = site.root_status(root)
    return now.state == "mounted" and now.worker_pid not in (0, pid)


def test_a_job_does_not_notice_that_its_worker_is_killed(site: Site) -> None:
    """Jobs see no error when their worker is killed, and the mount stays the same.

    They use open files, mappings, unlinked and nameless files, listings and every kind of change.
    """
    root = site.root("a")
    site.start()
    device = os.stat(root).st_dev
    rng = random.Random(1)
    with jobs(root, 2, site.top / "stop"):
        until("the jobs' work", lambda: (root / "best1").exists())
        for _ in range(6):
            time.sleep(rng.uniform(0, 0.3))
            kill_worker(site, root)
    assert os.stat(root).st_dev == device
    assert site.overlays(root) == 1
    snapshot = site.snapshot()
    log = (root / "log0").read_bytes()
    site.stop()
    assert site.content(snapshot, root, b"log0") == log


def test_removed_files_stay_open_through_a_stop_and_a_start(site: Site) -> None:
    """A detached session keeps removed files open, with their link counts, also in the next session."""
    root = site.root("a")
    site.start()
    for killed in (False, True):
        files = [os.open(root, os.O_TMPFILE | os.O_RDWR)]
        for name in ("removed", "linked"):
            files.append(os.open(root / name, os.O_RDWR | os.O_CREAT))
            os.unlink(root / name)
        os.mkfifo(root / "pipe")
        pipe = os.open(root / "pipe", os.O_RDWR)
        os.unlink(root / "pipe")
        for fd in files:
            os.write(fd, b"data")
        if killed:
            kill_worker(site, root)
        site.stop()
        site.start()
        for fd in files:
            assert os.pread(fd, 9, 0) == b"data"
            assert os.pwrite(fd, b"more", 4) == 4
            assert os.fstat(fd).st_nlink == 0
        assert os.fstat(pipe).st_nlink == 0
        for fd in (*files, pipe):
            os.close(fd)
    site.stop()


def test_a_handed_over_session_goes_on_with_its_tracking(site: Site) -> None:
    """The next snapshot after a handover, as in an upgrade, reads only what changed, in the same session."""
    root = site.root("a")
    site.start()
    for index in range(50):
        (root / f"old{index}").write_bytes(b"old")
    site.snapshot_until_tracking(root)
    before = site.root_status(root)
    (root / "changed").write_bytes(b"before")
    with jobs(root, 1, site.top / "stop"):
        until("the job's work", lambda: (root / "best0").exists())
        with WorkerControlClient(RuntimeDirectory(site.top / "run").worker_socket(str(root))) as client:
            client.hand_over()
        until("a successor", lambda: _served_by_another(site, root, before.worker_pid))
    assert site.root_status(root).session == before.session
    snapshot = site.snapshot()
    assert site.content(snapshot, root, b"changed") == b"before"
    site.stop()
    committed = [
        json.loads(line) for line in site.log.read_text().splitlines() if "snapshot_committed" in line
    ]
    assert committed[-1]["modes"] == {str(root): "tracked"}


def test_a_returning_daemon_continues_the_session_of_a_dead_worker(site: Site) -> None:
    """A daemon that returns continues a session whose connection systemd kept, and the job waits.

    Daemon and worker are killed together, and the keeper too, which exists where systemd does not fork the
    workers.
    """
    root = site.root("a")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(site.top / "notify"))
        site.environment = {"NOTIFY_SOCKET": str(site.top / "notify")}
        site.start()
        stored = _stored(manager)
        names = [name for name in stored if not name.startswith("control")]
        assert sorted(name.partition("-")[0] for name in names) == ["backing", "session"]
        with jobs(root, 1, site.top / "stop"):
            until("the job's work", lambda: (root / "best0").exists())
            worker = site.root_status(root).worker_pid
            for keeper in keeper_pids(site.top / "run"):
                os.kill(keeper, signal.SIGKILL)
            site.kill()
            os.kill(worker, signal.SIGKILL)
            until("the worker's end", lambda: ended(worker))
            site.restart_with(stored)
        site.stop()
    assert site.overlays(root) == 0


def _stored(manager: socket.socket) -> dict[str, int]:
    """Return the descriptors that the daemon has given to the service manager."""
    stored: dict[str, int] = {}
    manager.setblocking(False)
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(manager, 4096, 4)
        except BlockingIOError:
            return stored
        name = message.partition(b"FDNAME=")[2].split(b"\n")[0].decode()
        if message.startswith(b"FDSTORE=1"):
            (stored[name],) = fds
        elif message.startswith(b"FDSTOREREMOVE=1") and name in stored:
            os.close(stored.pop(name))


def test_a_worker_that_keeps_crashing_is_replaced_by_one_that_tracks_nothing(site: Site) -> None:
    """A worker without tracking serves the job after five crashes, with an alert and no snapshots."""
    root = site.root("a")
    site.start()
    with jobs(root, 1, site.top / "stop"):
        until("the job's work", lambda: (root / "best0").exists())
        for _ in range(5):
            before = site.root_status(root).worker_pid
            os.kill(before, signal.SIGSEGV)
            until("a successor", lambda before=before: _served_by_another(site, root, before))
        with site.client() as client:
            alerts = {alert.key: alert.message for alert in client.status().alerts}
    assert "without snapshots" in alerts[f"plain:{root}"]
    site.stop()


def test_a_worker_that_hangs_is_replaced(site: Site) -> None:
    """A stopped worker is killed after a while, and the job continues."""
    root = site.root("a")
    site.impatient = True
    site.start()
    with jobs(root, 1, site.top / "stop"):
        until("the job's work", lambda: (root / "best0").exists())
        before = site.root_status(root).worker_pid
        os.kill(before, signal.SIGSTOP)
        until("a successor", lambda: _served_by_another(site, root, before))
    site.stop()
