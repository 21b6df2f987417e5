"""Root and repository on one small disk: a snapshot that does not fit takes no space from the job."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ci import needs
from support.live import Live
from support.small_disks import missing, small_disk
from support.until import until

pytestmark = [pytest.mark.mount, pytest.mark.slow]
MIB = 1 << 20
DISK_BYTES = 120 * MIB
FILES = 6
FILE_BYTES = 10 * MIB
CHURN_BYTES = 2 * MIB
"""Bytes the job writes at a time: less than the reserve, 5 % of the disk."""
PATIENCE_SECONDS = 120.0


class Job(threading.Thread):
    """Replace a file repeatedly through the overlay, and record how little was free for others."""

    def __init__(self, root: Path, disk: Path) -> None:
        super().__init__(daemon=True)
        self._root, self._disk = root, disk
        self._ending = threading.Event()
        self.errors: list[OSError] = []
        self.rounds = 0
        self.least_free = free(disk)

    def run(self) -> None:
        data = os.urandom(CHURN_BYTES)
        while not self._ending.is_set():
            try:
                with open(self._root / "churn", "wb") as file:
                    file.write(data)
                    os.fsync(file.fileno())
                (self._root / "churn").unlink()
            except OSError as error:
                self.errors.append(error)
            self.rounds += 1
            self.least_free = min(self.least_free, free(self._disk))
            time.sleep(0.01)

    def end(self) -> None:
        self._ending.set()
        self.join(60)


def free(disk: Path) -> int:
    room = os.statvfs(disk)
    return room.f_bavail * room.f_frsize


def stored(repository: Path) -> int:
    return sum(path.stat().st_size for path in (repository / "packs").iterdir())


@contextmanager
def filled(top: Path, *, look_alike: bool) -> Iterator[tuple[Live, Path, Path]]:
    """Provide a daemon with 60 MiB in its root, which shares a disk of 120 MiB with the repository."""
    with small_disk(top, "ext4", DISK_BYTES, "-m", "5") as disk:
        root = disk / "root"
        root.mkdir()
        for number in range(FILES):
            content = bytearray(os.urandom(FILE_BYTES))
            # The estimate before the capture takes files with this common part for copies of one another.
            if look_alike:
                content[4 * MIB : 6 * MIB] = b"x" * (2 * MIB)
            (root / f"data{number}").write_bytes(content)
        os.sync()
        # Beside the disk: mounts below it are removed with the daemon.
        (top / "live").mkdir()
        with Live(top / "live", repository=disk / "repository") as live:
            live.run("protect", str(root))
            live.start(root)
            yield live, root, disk


def alerts(live: Live) -> dict[str, Any]:
    return {alert["key"]: alert for alert in (live.status() or {"alerts": []})["alerts"]}


@contextmanager
def locked(repository: Path) -> Iterator[None]:
    """Hold the writer's lock, as a long prune does: a snapshot is cut and waits."""
    with open(repository / "lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_snapshots_fit_after_a_large_checkpoint(short_tmp: Path) -> None:
    """What the job writes and keeps is no growth of others: a disk that holds job and snapshots takes both.

    Of what the job takes and gives back, a quarter of the disk at most stays free for it.
    """
    needs(missing("ext4"))
    size_bytes = 480 * MIB
    with small_disk(short_tmp, "ext4", size_bytes) as disk:
        root = disk / "root"
        root.mkdir()
        (root / "small").write_bytes(b"x")
        (short_tmp / "live").mkdir()
        with Live(short_tmp / "live", repository=disk / "repository", impatient=True) as live:
            live.run("protect", str(root))
            live.start(root)
            live.snapshot()
            (root / "checkpoint").write_bytes(os.urandom(150 * MIB))
            live.snapshot()
            assert "5% of" in live.status()["repository"]["reserve_reason"]  # type: ignore[index]
            (root / "next").write_bytes(os.urandom(120 * MIB))
            live.status()
            (root / "checkpoint").unlink()
            repository = live.status()["repository"]  # type: ignore[index]
            assert "took and gave back" in repository["reserve_reason"]
            assert repository["reserve_bytes"] <= size_bytes // 4
            (root / "more").write_bytes(os.urandom(40 * MIB))
            refused = live.run("snapshot", "--wait", expect=1).stderr.decode()
            for part in ("it needs more than", "is free on the file system of", "must stay free for others"):
                assert part in refused


def test_a_file_removed_while_a_snapshot_waits_frees_its_space(short_tmp: Path) -> None:
    """When the job needs the space of a file that a waiting snapshot keeps, the snapshot yields and the job sees no error."""
    needs(missing("ext4"))
    with small_disk(short_tmp, "ext4", DISK_BYTES) as disk:
        root = disk / "root"
        root.mkdir()
        (short_tmp / "live").mkdir()
        with Live(short_tmp / "live") as live:
            live.run("protect", str(root))
            live.start(root)
            for held_open in (False, True):
                (root / "new").unlink(missing_ok=True)
                live.snapshot()
                (root / "old").write_bytes(os.urandom(70 * MIB))
                with locked(live.repository):
                    live.run("snapshot")
                    writer = open(root / "new", "wb", buffering=0) if held_open else None
                    (root / "old").unlink()
                    data = os.urandom(MIB)
                    with writer or open(root / "new", "wb", buffering=0) as file:
                        for _ in range(90):
                            file.write(data)
                        os.fsync(file.fileno())
                snapshot = live.snapshot()
                live.run("verify", snapshot)
                assert live.run("cat", snapshot, str(root / "new")).stdout == 90 * data


@pytest.mark.parametrize("look_alike", [False, True], ids=["told beforehand", "found out"])
def test_a_first_snapshot_that_does_not_fit(short_tmp: Path, look_alike: bool) -> None:
    """A first snapshot that does not fit fails no write of the job and gives its space back.

    The alert says how much is missing; with that much freed the snapshot is taken.
    """
    needs(missing("ext4"))
    with filled(short_tmp, look_alike=look_alike) as (live, root, disk):
        job = Job(root, disk)
        job.start()
        try:
            until("the alert", lambda: alerts(live).get("capture"), PATIENCE_SECONDS)
            failed = live.run("snapshot", "--wait", expect=1)
            alert = alerts(live)["capture"]

            def shown() -> int:
                """Return the ordinary reserve, once all who tell it tell one.

                What the failed capture gives back may count as others' for an interval, which makes it larger.
                """
                repository = live.status()["repository"]  # type: ignore[index]
                text = live.run("status").stdout.decode()
                doctor = {f["check"]: f["message"] for f in live.json("doctor", expect=None)["findings"]}
                told = all("free for others (" in words for words in (text, doctor["reserve"]))
                reserve_bytes: int = repository["reserve_bytes"]
                return (
                    min(reserve_bytes, DISK_BYTES // 20) if told and reserve_bytes > 0.05 * 100 * MIB else 0
                )

            reserve = until("the reserve", shown, PATIENCE_SECONDS)
        finally:
            job.end()
        assert job.errors == []
        assert job.rounds > 10
        assert job.least_free >= reserve - CHURN_BYTES
        assert "no room for the snapshot" in alert["message"]
        assert "[repository] path" in alert["hint"]
        # There is no snapshot that prune could remove.
        assert "prune" not in alert["hint"]
        assert b"no room" in failed.stderr
        assert stored(disk / "repository") == 0
        assert live.run("list", "--machine-readable").stdout == b""

        # The remedy that the alert names.
        for number in range(4):
            (root / f"data{number}").unlink()
        snapshot = live.snapshot()
        assert snapshot
        assert "capture" not in alerts(live)
        live.run("verify", "--all", "--checksum")


def test_free_space_equals_that_of_df(short_tmp: Path) -> None:
    """Free space in `status` and the metric is what an ordinary process can use, without root's reserve."""
    needs(missing("ext4"))
    with small_disk(short_tmp, "ext4", DISK_BYTES, "-m", "20") as disk:
        root = disk / "root"
        root.mkdir()
        (short_tmp / "live").mkdir()
        with Live(short_tmp / "live", repository=disk / "repository", impatient=True) as live:
            live.run("protect", str(root))
            live.start(root)
            live.snapshot()
            room = os.statvfs(disk)
            assert room.f_bfree - room.f_bavail > 0.15 * room.f_blocks
            shown = live.status()["repository"]["free_bytes"]  # type: ignore[index]
            assert abs(shown - room.f_bavail * room.f_frsize) < MIB


def test_a_repository_that_was_moved_away(short_tmp: Path) -> None:
    """A repository that was moved away is reported by alert and `status` from the first failed snapshot on.

    When it is back, snapshots continue.
    """
    root = short_tmp / "root"
    root.mkdir()
    with Live(short_tmp) as live:
        live.run("protect", str(root))
        live.start(root)
        live.snapshot()
        live.repository.rename(short_tmp / "elsewhere")
        live.run("snapshot", "--wait", expect=3)
        alert = alerts(live)["missing"]
        assert "was there and is gone" in alert["message"]
        assert "move it back" in alert["hint"]
        text = live.run("status").stdout.decode()
        assert "not made yet" not in text
        assert f"store      the repository {live.repository} was there and is gone" in text
        (short_tmp / "elsewhere").rename(live.repository)
        live.snapshot()
        assert "missing" not in alerts(live)
