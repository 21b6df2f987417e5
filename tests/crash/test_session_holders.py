"""Daemon, worker and keeper: any two of them die at once, without systemd, and no call of the job fails."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio
from support.holders import PAIRS, Holders, kill_pairs, sessions_held_by
from support.injection import keeper_pids
from support.site import Site, ended
from support.site import kernel_site as kernel_site
from support.until import until

from ciuic.daemon.base.settings import RootSettings
from ciuic.daemon.roots.mount_hooks import RealMounts
from ciuic.daemon.roots.worker_process import WorkerOptions, adopt_worker

pytestmark = pytest.mark.mount


def test_any_two_of_daemon_worker_and_keeper_die_at_once(site: Site) -> None:
    """Jobs see no error and no wrong byte when any two of daemon, worker and keeper die.

    The mount stays, and the next daemon continues the session and takes a correct snapshot of it.
    """
    root = site.root("a")
    site.start()
    with open(root / "kept", "wb", buffering=0) as file:
        file.write(b"before ")
        device = os.stat(root).st_dev
        outcome = kill_pairs(site, root, [*PAIRS, PAIRS[0]], random.Random(4))
        file.write(b"after")
        assert os.stat(root).st_dev == device
    assert outcome.failures == []
    assert min(outcome.kills.values()) == 1
    assert outcome.rounds > 0
    snapshot = site.snapshot()
    site.stop()
    assert site.content(snapshot, root, b"kept") == b"before after"
    assert [
        path.name for path in (site.top / "run").glob("*") if path.name.startswith(("keeper", "worker"))
    ] == []


@pytest.mark.full
def test_a_job_goes_on_for_as_long_as_no_daemon_comes(site: Site) -> None:
    """The keeper starts one worker after another without a daemon; a later daemon adopts the last one."""
    root = site.root("a")
    site.start()
    holders = Holders(site, root)
    with open(root / "f", "wb", buffering=0) as file:
        first = holders.complete()
        holders.kill("daemon", "worker")
        for number in range(3):
            (root / f"new{number}").write_bytes(b"x")
            file.write(b"%d" % number)
            worker = holders.pids()["worker"]
            assert worker != first["worker"]
            os.kill(worker, signal.SIGKILL)
            until("the worker's end", lambda worker=worker: ended(worker))
        assert sorted(os.listdir(root)) == ["f", "new0", "new1", "new2"]
        assert keeper_pids(site.top / "run") == [first["keeper"]]
        site.start()
        file.write(b"3")
        until("the end of the first keeper", lambda: ended(first["keeper"]))
        holders.complete()
        snapshot = site.snapshot()
    site.stop()
    assert site.content(snapshot, root, b"f") == b"0123"
    assert keeper_pids(site.top / "run") == []


def test_while_a_daemon_is_connected_the_keeper_starts_nothing(site: Site) -> None:
    """The keeper starts no worker while a daemon is connected, and answers calls once it is gone.

    Exactly one of the two replaces a worker at any time.
    """
    root = site.root("a")
    site.start()
    holders = Holders(site, root)
    worker = holders.complete()["worker"]
    (path,) = (site.top / "run").glob("keeper-*.sock")
    with (
        ThreadPoolExecutor(1) as pool,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon,
    ):
        daemon.settimeout(30)
        daemon.connect(str(path))
        site.kill()
        os.kill(worker, signal.SIGKILL)
        until("the worker's end", lambda: ended(worker))
        call = pool.submit((root / "f").write_bytes, b"x")
        # Each answer ends one turn of the daemon's loop, in which it has seen the worker's end.
        for _ in range(4):
            daemon.send(b'{"do": "take", "root": "/none"}')
            assert daemon.recv(100) == b"false"
        assert "worker" not in holders.pids()
        assert not call.done()
        daemon.close()
        assert call.result(60) == 1
    site.start()
    site.stop()


def test_the_whole_process_group_is_killed(site: Site) -> None:
    r"""Killing the daemon's whole process group (^\ or `kill -9 -PGID`) leaves the job's calls answered.

    Worker and keeper run in groups and sessions of their own; only the daemon and its short-lived children
    die.
    """
    root = site.root("a")
    site.own_group = True
    site.start()
    pids = Holders(site, root).complete()
    groups = {name: (os.getpgid(pid), os.getsid(pid)) for name, pid in pids.items()}
    assert len({group for group, _ in groups.values()}) == len({sid for _, sid in groups.values()}) == 3
    with open(root / "f", "wb", buffering=0) as file:
        os.killpg(pids["daemon"], signal.SIGKILL)
        os.kill(pids["worker"], signal.SIGKILL)
        site.kill()
        file.write(b"one")
        (root / "g").write_bytes(b"two")
        site.start()
        file.write(b"three")
    assert (root / "f").read_bytes() == b"onethree"
    site.stop()


@pytest.mark.full
def test_the_reader_of_the_log_dies_with_them(site: Site, short_tmp: Path) -> None:
    """Killing `ciuic daemon 2>&1 | tee log` with its log reader loses log lines and nothing else."""
    root, log = site.root("a"), site.log
    os.mkfifo(short_tmp / "fifo")
    with subprocess.Popen(["cat", str(short_tmp / "fifo")], stdout=subprocess.DEVNULL) as reader:
        try:
            site.log = short_tmp / "fifo"
            site.start()
            site.log = log
            holders = Holders(site, root)
            pids = holders.complete()
        finally:
            reader.kill()
    with open(root / "f", "wb", buffering=0) as file:
        for _ in range(2):
            worker = holders.pids()["worker"]
            if site.process is not None:
                site.kill()
            os.kill(worker, signal.SIGKILL)
            file.write(b"x")
            (root / "g").write_bytes(b"y")
        assert keeper_pids(site.top / "run") == [pids["keeper"]]
        site.start()
        file.write(b"x")
    assert (root / "f").read_bytes() == b"xxx"
    site.stop()


def test_all_three_killed_leave_a_dead_mount_that_the_next_daemon_takes_off(site: Site) -> None:
    """Calls fail with ENOTCONN after all three are killed, and the next daemon unmounts the dead mount."""
    root = site.root("a")
    site.start()
    holders = Holders(site, root)
    (root / "f").write_bytes(b"x")
    os.sync()
    # The daemon first: it gives a keeper that is killed a successor.
    holders.kill("daemon", "keeper", "worker")
    # A call that the kernel had queued before the last thread of the worker was gone is aborted.
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        os.listdir(root)
    site.start()
    assert (root / "f").read_bytes() == b"x"
    assert site.overlays(root) == 1
    site.stop()


def test_the_keeper_ends_with_an_orderly_stop_and_with_the_last_session(site: Site) -> None:
    """Stop and unprotect leave no process that holds a session; a keeper ends with its mount."""
    root, other = site.root("a"), site.root("b")
    site.start()
    keeper = Holders(site, root).complete()["keeper"]
    assert sessions_held_by(keeper) == 2
    with site.client() as client:
        client.remove_root(str(other))
    assert sessions_held_by(keeper) == 1
    site.stop()
    until("the keeper's end", lambda: ended(keeper))
    assert list((site.top / "run").glob("keeper-*")) == []
    site.roots.remove(other)
    site.start()
    keeper = Holders(site, root).complete()["keeper"]
    site.kill()
    subprocess.run(["umount", str(root)], check=True, timeout=30)
    until("the keeper's end without a daemon", lambda: ended(keeper))
    assert list((site.top / "run").glob("keeper-*")) == []


@pytest.mark.full
def test_a_session_that_another_worker_serves_is_adopted_and_not_given_up(site: Site) -> None:
    """A session that another worker serves is adopted and not abandoned.

    The daemon's own worker exits with a status that says so. Counted as deaths, eight of those exits once
    ended the session.
    """
    root = site.root("a")
    site.start()
    Holders(site, root).complete()
    (path,) = (site.top / "run").glob("worker-*.sock")
    serving = adopt_worker(path)
    assert serving is not None
    options = WorkerOptions(str(root), path, "kernel", 65_536, 1 << 30)
    hooks = RealMounts(lambda settings: options, lambda root: ())
    found = trio.run(lambda: hooks.succeed(RootSettings(str(root)), serving, plain=False))
    assert (found.pid, found.session) == (serving.pid, serving.session)
    for worker in (found, serving):
        worker.close()
    (root / "f").write_bytes(b"served")
    site.stop()
