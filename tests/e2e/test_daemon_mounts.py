"""The real daemon over real mounts: what its processes do to one another, and what they leave behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.holders import keeper_pids
from support.site import Site, ended, site_in, until

from ciuic.errors import Busy, NotFound, UsageError
from ciuic.repository import Repository

pytestmark = pytest.mark.mount


@pytest.fixture
def site(short_tmp: Path) -> Iterator[Site]:
    with site_in(short_tmp) as made:
        yield made


def test_a_stopped_daemon_leaves_nothing_behind(site: Site) -> None:
    """After SIGTERM no mount, no socket and no process is left, and the files are simply there."""
    root = site.root("a")
    site.start()
    (root / "f").write_text("kept")
    worker = site.root_status(root).worker_pid
    site.stop()
    assert site.overlays(root) == 0
    assert not (site.top / "run").exists()
    assert ended(worker)
    assert (root / "f").read_text() == "kept"


def test_systemd_is_told_when_the_roots_are_mounted_and_when_it_ends(site: Site) -> None:
    """READY comes when the overlay is there, the watchdog is fed meanwhile, STOPPING comes before it is taken away."""
    root = site.root("a")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(site.top / "notify"))
        manager.settimeout(30)
        site.environment = {"NOTIFY_SOCKET": str(site.top / "notify"), "WATCHDOG_USEC": "600000"}
        site.process = site.launch()
        said = []
        while not said or not said[-1].startswith(b"READY=1"):
            said.append(manager.recv(4096))
        assert site.overlays(root) == 1
        assert b"STATUS=1 of 1 root protected" in said[-1]
        assert any(line.startswith(b"FDSTORE=1\nFDNAME=control") for line in said)
        while manager.recv(4096) != b"WATCHDOG=1":
            pass
        site.stop()
        manager.setblocking(False)
        rest = []
        with suppress(BlockingIOError):
            while True:
                rest.append(manager.recv(4096))
        assert any(line.startswith(b"STOPPING=1") for line in rest)
        assert rest[-1].startswith(b"FDSTOREREMOVE=1")


def test_what_was_written_before_the_request_is_in_the_snapshot(site: Site) -> None:
    """Writes that the kernel still holds back, in a file that stays open, are flushed before the cut."""
    root = site.root("a")
    site.start()
    with open(root / "log", "wb", buffering=0) as log:
        for number in range(50):
            log.write(b"%d\n" % number)
        snapshot = site.snapshot()
    site.stop()
    assert site.content(snapshot, root, b"log") == b"".join(b"%d\n" % number for number in range(50))


def test_two_roots_are_cut_at_one_instant(site: Site) -> None:
    """A writer that writes b only after a: no snapshot shows more in b than in a."""
    first, second = site.root("a"), site.root("b")
    for root in (first, second):
        (root / "f").touch()
    site.start()
    ending = threading.Event()

    def write() -> None:
        # Existing files: who makes a new one writes past the overlay, and no cut holds that (unseen.py).
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
    """The root is served again, nothing written before is lost, and an alert tells of it."""
    root = site.root("a")
    site.start()
    (root / "f").write_text("before")
    until("the snapshot that every first start takes", site.has_schedule)
    site.snapshot()  # also waits for that one, which was cut before
    before = site.root_status(root)
    os.kill(before.worker_pid, signal.SIGKILL)
    until("a new worker", lambda: site.root_status(root).worker_pid not in (0, before.worker_pid))
    after = site.root_status(root)
    assert (after.state, after.restarts) == ("mounted", 1)
    assert after.session != before.session
    for worker in (before, after):  # a take-over is ahead of the job, serving is not
        until(
            "the usual priority",
            lambda pid=worker.worker_pid: priorities(pid) <= {os.getpriority(os.PRIO_PROCESS, 0)},
        )
    assert (root / "f").read_text() == "before"
    with site.client() as client:
        assert [alert.key for alert in client.status().alerts] == [f"worker:{root}"]
    snapshot = site.snapshot()
    assert alerts(site) == []  # what was changed meanwhile is in the snapshot
    site.stop()
    assert site.content(snapshot, root, b"f") == b"before"


def priorities(pid: int) -> set[int]:
    """Nice values of a process's threads, and of its scheduling group where it has one; empty when it has ended."""
    try:
        tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
        found = {os.getpriority(os.PRIO_PROCESS, task) for task in tasks}
        group = Path(f"/proc/{pid}/autogroup")
        return found | ({int(group.read_text().split()[-1])} if group.exists() else set())
    except (FileNotFoundError, ProcessLookupError):
        return set()


def test_a_killed_daemon_is_followed_without_the_job_noticing(site: Site) -> None:
    """The worker serves on, open files stay open, the next daemon adopts it with its tracking."""
    root = site.root("a")
    site.start()
    with open(root / "f", "wb", buffering=0) as file:
        file.write(b"one ")
        site.snapshot()
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
        assert loaded.roots[0].mode == "tracked"
    assert site.content(snapshot, root, b"f") == b"one two three"
    site.stop()


def test_dead_mounts_of_a_killed_predecessor_are_taken_away(site: Site) -> None:
    """Daemon, worker and keeper killed together leave a dead mount; the next daemon starts over it."""
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
    """The id was given out, the daemon was killed before the commit: the next one brings it home."""
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


def test_a_second_daemon_is_refused_and_harms_nothing(site: Site) -> None:
    """It says who runs already, with the exit code of "busy", and the first serves on."""
    root = site.root("a")
    site.start()
    assert site.launch().wait(60) == Busy.exit_code
    assert b"another ciuic daemon" in site.log.read_bytes()
    assert site.root_status(root).state == "mounted"
    site.stop()


def test_a_job_with_an_open_file_is_not_hurt_by_a_stop(site: Site) -> None:
    """The mount goes, the open file goes on working, its worker ends with it, and a restart starts clean."""
    root = site.root("a")
    site.start()
    worker = site.root_status(root).worker_pid
    with open(root / "f", "wb", buffering=0) as file:
        file.write(b"before ")
        site.stop()
        assert site.overlays(root) == 0
        file.write(b"after")
        os.fsync(file.fileno())
        assert (root / "f").read_bytes() == b"before after"
        site.start()
        status = site.root_status(root)
        assert status.worker_pid != worker
        until(
            "the look at processes, which comes after the mount",
            lambda: worker in [process.pid for process in site.root_status(root).bypassing],
        )
    until("the end of the old worker", lambda: ended(worker))
    assert site.root_status(root).worker_pid == status.worker_pid
    snapshot = site.snapshot()
    assert site.content(snapshot, root, b"f") == b"before after"
    site.stop()


def test_roots_come_and_go_while_the_daemon_runs(site: Site) -> None:
    """A root added to the configuration is mounted when asked for, and taken away again; both twice without harm."""
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


def test_a_changed_configuration_is_taken_up(site: Site) -> None:
    """SIGHUP and reload mount what was added and unmount what was taken out; what cannot be meant changes nothing."""
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


def test_a_root_that_is_missing_does_not_stop_the_others(site: Site) -> None:
    """The daemon serves what it can, says what it cannot, and takes the root up when it appears."""
    first, second = site.root("a"), site.root("b")
    second.rmdir()
    site.process = site.launch()
    until("the first mount", lambda: site.socket.exists() and site.overlays(first) == 1)
    until("the alert", lambda: any(alert.root == str(second) for alert in alerts(site)))
    second.mkdir()
    until("the second mount", lambda: site.overlays(second) == 1)
    until("the end of the alert", lambda: not alerts(site))
    site.stop()


def alerts(site: Site) -> list[object]:
    with site.client() as client:
        return list(client.status().alerts)


def test_the_first_start_takes_a_snapshot_and_a_restart_does_not(site: Site) -> None:
    """Downtime longer than the interval is made up for at once; a short one is not."""
    site.root("a")
    site.start()

    def committed() -> int:
        with site.client() as client:
            return client.status().repository.snapshots

    until("the first snapshot", lambda: committed() == 1)
    site.stop()
    site.start()
    with site.client() as client:
        status = client.status()
    assert status.next_snapshot is not None
    assert status.captures == []
    assert status.repository.snapshots == 1
    assert "requests" in status.beside.hears, "captures hear the workers of this daemon"
    site.stop()
