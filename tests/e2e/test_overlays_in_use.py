"""An overlay that a job works in outlives `stop` and `unprotect`, until the job has left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.site import Site, ended
from support.until import until

from ciuic.system import mountinfo
from ciuic.system.open_files import mount_users

pytestmark = pytest.mark.mount


class Job:
    """A process with its working directory and a file in a root; it writes a line when it is told to."""

    def __init__(self, root: Path) -> None:
        script = "exec 9>>log; while read -r word; do pwd -P >&9 && echo done || echo failed; done"
        self.process = subprocess.Popen(
            ["bash", "-c", script], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def works(self) -> bool:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "done\n"

    def leave(self) -> None:
        self.process.communicate(timeout=30)


@pytest.fixture
def root(site: Site) -> Path:
    return site.root("a")


@pytest.fixture
def job(site: Site, root: Path) -> Iterator[Job]:
    site.start()
    made = Job(root)
    assert made.works()
    try:
        yield made
    finally:
        made.process.kill()
        made.leave()
        until("the end of the overlay", lambda: site.process is not None or site.overlays(root) == 0)


def test_a_stop_leaves_nobody_behind(site: Site, root: Path, job: Job) -> None:
    """Who works in the root goes on after the stop and is named; when the last one has left, the plain files are there."""
    worker = site.root_status(root).worker_pid
    site.stop()
    assert job.works()
    assert [user.pid for user in mount_users(str(root))] == [job.process.pid]
    assert "root_in_use" in site.log.read_text()
    job.leave()
    until("the end of the worker", lambda: ended(worker))
    assert site.overlays(root) == 0
    assert (root / "log").read_text() == f"{root}\n" * 2


def test_the_next_daemon_goes_on_with_it(site: Site, root: Path, job: Job) -> None:
    """The next daemon adopts a worker that has outlived a stop: snapshots have the job's writes, and a killed worker has a successor."""
    worker = site.root_status(root).worker_pid
    site.stop()
    assert job.works()
    site.start()
    assert site.root_status(root).worker_pid == worker
    assert job.works()
    assert site.content(site.snapshot(), root, b"log") == f"{root}\n".encode() * 3
    if site.driver != "pyfuse3":
        os.kill(worker, signal.SIGKILL)
        until("a successor", lambda: site.root_status(root).worker_pid not in (0, worker))
        assert job.works()
    job.leave()
    # The stop is taken back: the overlay does not end with the job.
    (root / "after").write_text("seen")
    assert site.content(site.snapshot(), root, b"after") == b"seen"
    assert site.overlays(root) == 1
    site.stop()
    assert site.overlays(root) == 0


def test_a_root_that_is_no_longer_protected_is_served_to_the_end(site: Site, root: Path, job: Job) -> None:
    """After unprotect the job goes on, also through the death of the worker; status names it; then nothing of ciuic is left."""
    worker = site.root_status(root).worker_pid
    with site.client() as client:
        client.remove_root(str(root))
    assert job.works()
    until("the root in the status", lambda: "bash" in site.root_status(root).error)
    assert site.root_status(root).state == "stopping"
    assert site.root_status(root).next_snapshot is None
    if site.driver != "pyfuse3":
        os.kill(worker, signal.SIGKILL)
        until("a successor", lambda: site.root_status(root).worker_pid not in (0, worker))
        assert job.works()
    job.leave()
    until("the end of the overlay", lambda: site.overlays(root) == 0)
    with site.client() as client:
        until("the end of the root", lambda: not client.status().roots)
    site.stop()
    assert (root / "log").exists()


def test_what_is_mounted_inside_does_not_keep_a_root_that_is_no_longer_protected(
    site: Site, root: Path, job: Job
) -> None:
    """The overlay ends with its last user although something is mounted inside, which stays in its place as the same mount."""
    place = root / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "inside", str(place)], check=True, timeout=30)
    try:
        (place / "precious").write_text("kept")
        before = mountinfo.mounts_at(os.fsencode(place), mountinfo.read())
        with site.client() as client:
            client.remove_root(str(root))
            assert job.works()
            assert site.overlays(root) == 1
            job.leave()
            until("the end of the overlay", lambda: site.overlays(root) == 0)
            until("the end of the root", lambda: not client.status().roots)
        after = mountinfo.mounts_at(os.fsencode(place), mountinfo.read())
        assert [mount.mount_id for mount in after] == [mount.mount_id for mount in before]
        assert (place / "precious").read_text() == "kept"
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=30)


def test_a_root_that_is_protected_again_goes_on(site: Site, root: Path, job: Job) -> None:
    """A root that is protected again while a job is still in its old overlay goes on with that."""
    worker = site.root_status(root).worker_pid
    with site.client() as client:
        client.remove_root(str(root))
        assert job.works()
        assert client.add_root(str(root)).worker_pid == worker
    job.leave()
    (root / "after").write_text("seen")
    assert site.content(site.snapshot(), root, b"after") == b"seen"
    site.stop()
