"""The real daemon over real mounts: how its processes affect one another, and what they leave behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from support.injection import keeper_pids
from support.site import Site, ended
from support.until import until

from ciuic import STATE_DIR_NAME
from ciuic.errors import Busy, NotFound, UsageError
from ciuic.protocol.control_types import Alert
from ciuic.repository import Repository

pytestmark = pytest.mark.mount


def test_a_stopped_daemon_leaves_no_mount_socket_or_process(site: Site) -> None:
    """A daemon ended by SIGTERM leaves plain files, and no mount, socket or process."""
    root = site.root("a")
    site.start()
    (root / "f").write_text("kept")
    worker = site.root_status(root).worker_pid
    site.stop()
    assert site.overlays(root) == 0
    assert list((site.top / "run").glob("*")) == []
    assert not (site.top / "run").exists()
    assert ended(worker)
    assert (root / "f").read_text() == "kept"


@pytest.mark.full
def test_systemd_is_notified_of_mounted_roots_and_of_the_end(site: Site) -> None:
    """The daemon sends READY once the overlay is mounted, and STOPPING before it unmounts.

    It feeds the watchdog meanwhile.
    """
    root = site.root("a")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(site.top / "notify"))
        manager.settimeout(30)
        site.environment = {"NOTIFY_SOCKET": str(site.top / "notify"), "WATCHDOG_USEC": "600000"}
        site.process = site.launch()
        messages = []
        while not messages or not messages[-1].startswith(b"READY=1"):
            messages.append(manager.recv(4096))
        assert site.overlays(root) == 1
        assert b"STATUS=1 of 1 root protected" in messages[-1]
        assert any(line.startswith(b"FDSTORE=1\nFDNAME=control") for line in messages)
        while manager.recv(4096) != b"WATCHDOG=1":
            pass
        rest: list[bytes] = []

        def receive() -> None:
            # While it stops: the socket's queue holds ten messages, and a slow stop feeds the watchdog more often.
            while (message := manager.recv(4096)) != b"the end":
                rest.append(message)

        reader = threading.Thread(target=receive)
        reader.start()
        try:
            site.stop()
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.sendto(b"the end", str(site.top / "notify"))
            reader.join(60)
        assert any(line.startswith(b"STOPPING=1") for line in rest)
        assert rest[-1].startswith(b"FDSTOREREMOVE=1")


@pytest.mark.full
def test_writes_before_the_request_are_in_the_snapshot(site: Site) -> None:
    """Writes that the kernel still caches, in a file that stays open, are flushed before the cut."""
    root = site.root("a")
    site.start()
    with open(root / "log", "wb", buffering=0) as log:
        for number in range(50):
            log.write(b"%d\n" % number)
        snapshot = site.snapshot()
    site.stop()
    assert site.content(snapshot, root, b"log") == b"".join(b"%d\n" % number for number in range(50))


def test_two_roots_are_cut_at_one_instant(site: Site) -> None:
    """Two roots are cut at one instant: no snapshot has more in b, written after a, than in a."""
    first, second = site.root("a"), site.root("b")
    for root in (first, second):
        (root / "f").touch()
    site.start()
    ending = threading.Event()

    def write() -> None:
        # Existing files: the creator of a new one bypasses the overlay, and no cut holds that write
        # (passthrough_writers.py).
        with open(first / "f", "ab", buffering=0) as one, open(second / "f", "ab", buffering=0) as two:
            while not ending.is_set():
                for file in (one, two):
                    file.write(b"x")
                    os.fsync(file.fileno())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        snapshots = [site.snapshot() for _ in range(5)]
    finally:
        ending.set()
        writer.join()
    site.stop()
    lengths = [
        (len(site.content(id_, first, b"f")), len(site.content(id_, second, b"f"))) for id_ in snapshots
    ]
    assert all(0 <= one - two <= 1 for one, two in lengths), lengths


def test_a_killed_worker_is_replaced_at_once(site: Site) -> None:
    """A root whose worker was killed is served again, with no earlier write lost, and an alert reports it."""
    root = site.root("a")
    site.start()
    (root / "f").write_text("before")
    until("the snapshot that every first start takes", site.has_schedule)
    # The job also waits for that snapshot, which was cut before.
    site.snapshot()
    before = site.root_status(root)
    os.kill(before.worker_pid, signal.SIGKILL)
    until("a new worker", lambda: site.root_status(root).worker_pid not in (0, before.worker_pid))
    after = site.root_status(root)
    assert (after.state, after.restarts) == ("mounted", 1)
    assert after.session != before.session
    # A take-over has priority over the job, serving has not.
    for worker in (before, after):
        until(
            "the usual priority",
            # Of the tests themselves, which may run at any; a group of its own has none.
            lambda pid=worker.worker_pid: priorities(pid) <= {os.getpriority(os.PRIO_PROCESS, 0), 0},
        )
    assert (root / "f").read_text() == "before"
    assert [alert.key for alert in alerts(site)] == [f"worker:{root}"]
    snapshot = site.snapshot()
    # The snapshot has the changes made meanwhile, so the alert has ended.
    assert alerts(site) == []
    site.stop()
    assert site.content(snapshot, root, b"f") == b"before"


def priorities(pid: int) -> set[int]:
    """Return the nice values of a process's threads and scheduling group; empty when it has ended."""
    try:
        tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
        found = {os.getpriority(os.PRIO_PROCESS, task) for task in tasks}
        group = Path(f"/proc/{pid}/autogroup")
        return found | ({int(group.read_text().split()[-1])} if group.exists() else set())
    except (FileNotFoundError, ProcessLookupError):
        return set()


def test_a_killed_daemon_is_followed_without_the_job_noticing(site: Site) -> None:
    """The worker serves on after the daemon is killed, and the next daemon adopts it with its tracking."""
    root = site.root("a")
    site.start()
    with open(root / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        site.snapshot_until_tracking(root)
        before = site.root_status(root)
        site.kill()
        file.write(b"two ")
        site.start()
        file.write(b"three")
        after = site.root_status(root)
        assert (after.worker_pid, after.session) == (before.worker_pid, before.session)
        snapshot = site.snapshot()
    assert site.overlays(root) == 1
    with Repository.open(site.top / "repository") as repository:
        loaded = repository.snapshots.load(repository.snapshots.resolve(snapshot))
        # A test beside this one may have files open that are deeper than any path that the kernel reports:
        # it is not known then that they lie elsewhere, and tracking does not count.
        log = site.log.read_text()
        assert loaded.roots[0].mode == "tracked" or '"located": false' in log, log[-6000:]
    assert site.content(snapshot, root, b"f") == b"one two three"
    site.stop()


@pytest.mark.full
def test_dead_mounts_of_a_killed_predecessor_are_taken_away(site: Site) -> None:
    """Daemon, worker and keeper killed together leave a dead mount, over which the next daemon starts."""
    root = site.root("a")
    site.start()
    (root / "f").write_text("x")
    os.sync()
    worker, keepers = site.root_status(root).worker_pid, keeper_pids(site.top / "run")
    site.kill()
    for pid in (*keepers, worker):
        os.kill(pid, signal.SIGKILL)
        until("the end of the process", lambda pid=pid: ended(pid))
    assert site.overlays(root) == 1
    site.start()
    assert site.overlays(root) == 1
    assert (root / "f").read_text() == "x"
    site.stop()
    assert site.overlays(root) == 0


def test_a_promised_snapshot_survives_the_daemon(site: Site) -> None:
    """A snapshot whose id was returned is committed by the next daemon if the daemon is killed before."""
    root = site.root("a")
    site.start()
    site.snapshot()
    (root / "f").write_bytes(os.urandom(64 << 20))
    with site.client() as client:
        promised = client.take_snapshot().id
    site.kill()
    (root / "f").write_bytes(b"changed since")
    site.start()
    with site.client() as client:
        assert client.wait_snapshot(promised).state == "committed"
    site.stop()
    with Repository.open(site.top / "repository") as repository:
        loaded = repository.snapshots.load(repository.snapshots.resolve(promised))
        entry = repository.trees.entry(loaded.roots[0].entry.content, b"f")
    assert entry is not None
    assert entry.size_bytes == 64 << 20


@pytest.mark.full
def test_a_second_daemon_is_refused_and_harms_nothing(site: Site) -> None:
    """A second daemon names the running one and exits with the code for busy; the first serves on."""
    root = site.root("a")
    site.start()
    assert site.launch().wait(60) == Busy.exit_code
    assert b"another ciuic daemon" in site.log.read_bytes()
    assert site.root_status(root).state == "mounted"
    site.stop()


@pytest.mark.full
def test_a_job_with_an_open_file_is_not_hurt_by_a_stop(site: Site) -> None:
    """An open file works on after a stop, and the next daemon goes on with its worker and misses nothing."""
    root = site.root("a")
    site.start()
    worker = site.root_status(root).worker_pid
    with open(root / "f", "wb", buffering=0) as file:
        file.write(b"before ")
        site.stop()
        assert site.overlays(root) == 1
        file.write(b"after")
        os.fsync(file.fileno())
        assert (root / "f").read_bytes() == b"before after"
        site.start()
        assert site.root_status(root).worker_pid == worker
        file.write(b" stop")
        os.fsync(file.fileno())
    assert site.root_status(root).worker_pid == worker
    assert not site.root_status(root).bypassing
    snapshot = site.snapshot()
    assert site.content(snapshot, root, b"f") == b"before after stop"
    site.stop()


@pytest.mark.full
def test_roots_come_and_go_while_the_daemon_runs(site: Site) -> None:
    """A root added to the configuration is mounted on request and removed again, both twice without harm."""
    first = site.root("a")
    site.start()
    second = site.root("b")
    with site.client() as client:
        with pytest.raises(NotFound):
            client.add_root(str(second))
        site.write_config()
        for _ in range(2):
            assert client.add_root(str(second)).state == "mounted"
        assert site.overlays(second) == 1
        for _ in range(2):
            client.remove_root(str(second))
        assert site.overlays(second) == 0
        assert [root.path for root in client.status().roots] == [str(first)]
    site.stop()


@pytest.mark.full
@pytest.mark.parametrize("ends", [True, False], ids=["closed", "daemon stopped first"])
def test_the_state_of_a_root_goes_with_the_last_open_file(site: Site, ends: bool) -> None:
    """A file that a job has open is served until its close after unprotect, also without the daemon.

    Then none of ciuic's files is left.
    """
    site.root("a")
    second = site.root("b")
    site.start()
    container = site.top / os.fsdecode(STATE_DIR_NAME)
    states = set(os.listdir(container))
    with open(second / "log", "wb", buffering=0) as job:
        with site.client() as client:
            client.remove_root(str(second))
        job.write(b"goes on")
        assert set(os.listdir(container)) == states
        if not ends:
            site.stop()
    if ends:
        until("the removal of the state", lambda: len(os.listdir(container)) == len(states) - 1)
        site.stop()
    assert (second / "log").read_bytes() == b"goes on"


@pytest.mark.full
def test_a_changed_configuration_is_taken_up(site: Site) -> None:
    """SIGHUP and reload mount added roots and unmount removed ones; an invalid file changes nothing."""
    first = site.root("a")
    site.start()
    second = site.root("b")
    site.write_config()
    assert site.process is not None
    site.process.send_signal(signal.SIGHUP)
    until("the second mount", lambda: site.overlays(second) == 1)
    text = site.config.read_text()
    with site.client() as client:
        site.config.write_text(text.replace("[[root]]", "[[rot]]"))
        with pytest.raises(UsageError, match="rot"):
            client.reload()
        site.config.write_text(text.replace(f'path = "{second}"', f'path = "{first}/inside"'))
        with pytest.raises(UsageError):
            client.reload()
        assert (site.overlays(first), site.overlays(second)) == (1, 1)
        site.roots.remove(second)
        third = site.root("c")
        site.write_config()
        changes = {change.path: (change.change, change.state) for change in client.reload().changes}
        assert changes == {str(second): ("removed", "unmounted"), str(third): ("added", "mounted")}
    assert (site.overlays(first), site.overlays(second)) == (1, 0)
    site.stop()


@pytest.mark.full
def test_a_root_that_is_missing_does_not_stop_the_others(site: Site) -> None:
    """The daemon serves the roots that exist, reports a missing one, and serves it when it appears."""
    first, second = site.root("a"), site.root("b")
    second.rmdir()
    site.process = site.launch()
    until("the first mount", lambda: site.socket.exists() and site.overlays(first) == 1)
    until("the alert", lambda: any(alert.root == str(second) for alert in alerts(site)))
    second.mkdir()
    until("the second mount", lambda: site.overlays(second) == 1)
    until("the end of the alert", lambda: not alerts(site))
    site.stop()


def alerts(site: Site) -> list[Alert]:
    """Return the alerts, without those of mount namespaces that tests beside this one make."""
    with site.client() as client:
        return [alert for alert in client.status().alerts if not alert.key.startswith("bypass-mounts:")]


@pytest.mark.full
def test_the_first_start_takes_a_snapshot_and_a_restart_does_not(site: Site) -> None:
    """A downtime longer than the interval is made up for by a snapshot at once, a shorter one is not."""
    site.root("a")
    site.start()

    def committed() -> int:
        with site.client() as client:
            return client.status().repository.snapshots

    until("the first snapshot", lambda: committed() == 1)
    site.stop()
    site.start()
    with site.client() as client:
        # Its roots are mounted before the daemon looks for the newest snapshot, from which the schedule counts.
        until("the schedule", lambda: client.status().next_snapshot)
        status = client.status()
    assert status.captures == []
    assert status.repository.snapshots == 1
    assert "requests" in status.beside.hears, "captures hear the workers of this daemon"
    site.stop()
