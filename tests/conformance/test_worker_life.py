"""The worker's life: how it starts, how it stops, and what each way of ending leaves."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.overlay import DRIVER, PASSES, Overlay, state_of
from support.until import until

from ciuic.fuse_layer.system import mounts
from ciuic.protocol.worker_client import WorkerUnreachable
from ciuic.system.io_throttle import WAITS_SUFFIX

pytestmark = pytest.mark.mount

WAIT_SECONDS = 60
_TRIES = 10


@pytest.fixture
def root(short_tmp: Path) -> Path:
    path = short_tmp / "root"
    path.mkdir()
    (path / "before").write_text("was here before the mount")
    return path


@pytest.fixture
def overlay(root: Path, short_tmp: Path) -> Iterator[Overlay]:
    with Overlay(root, short_tmp / "w.sock") as overlay:
        yield overlay


def test_a_mount_in_place_shows_the_existing_files(overlay: Overlay, root: Path) -> None:
    """A mount in place shows the same files and hides the state directory, and status names the server."""
    assert mounts.overlay_at(os.fspath(root)) is not None
    assert os.listdir(root) == ["before"]
    assert (root / "before").read_text() == "was here before the mount"
    assert (state_of(root) / "undo").is_dir()
    status = overlay.client.status()
    assert (status.driver, status.epoch, len(status.session)) == (DRIVER, 1, 32)
    assert status.mounted_ns > 0
    assert status.requests > 0
    assert not status.passthrough or PASSES


def test_the_time_that_requests_wait_is_published_for_captures(overlay: Overlay, root: Path) -> None:
    """A request kept waiting by a hold is published beside the control socket until the worker ends."""
    published = Path(f"{overlay.client.socket_path}{WAITS_SUFFIX}")
    job = threading.Thread(target=lambda: (root / "made").mkdir())
    overlay.client.hold(WAIT_SECONDS)
    try:
        job.start()
        until("the published figure", lambda: _microseconds(published) > 50_000, WAIT_SECONDS)
    finally:
        overlay.client.release()
        job.join()
    waited_us = overlay.client.status().waited_us
    assert waited_us >= 50_000
    assert overlay.stop() == 0
    assert not published.exists()


def _microseconds(published: Path) -> int:
    return int.from_bytes(published.read_bytes(), "little")


def test_the_reserved_name_cannot_be_had(overlay: Overlay, root: Path) -> None:
    """The reserved name is never found nor made, and a refusal does not make it visible."""
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            os.stat(root / ".ciuic-state")
        with pytest.raises(PermissionError):
            os.mkdir(root / ".ciuic-state")
        with pytest.raises(PermissionError):
            os.rename(root / "before", root / ".ciuic-state")


def test_stop_with_nothing_open_ends_at_once(overlay: Overlay, root: Path) -> None:
    """A stop request detaches, saves the tracking and ends with status 0; the plain files are complete."""
    (root / "after").write_text("written through the mount")
    assert overlay.stop() == 0
    assert mounts.overlay_at(os.fspath(root)) is None
    assert (root / "after").read_text() == "written through the mount"
    assert (state_of(root) / "tracking").exists()
    assert not overlay.client.socket_path or not os.path.exists(overlay.client.socket_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it_cleanly(overlay: Overlay, root: Path, number: signal.Signals) -> None:
    """SIGTERM and SIGINT stop the worker as a stop request does."""
    overlay.process.send_signal(number)
    assert overlay.process.wait(WAIT_SECONDS) == 0
    assert mounts.overlay_at(os.fspath(root)) is None
    assert (state_of(root) / "tracking").exists()


def test_an_open_file_is_served_after_the_stop_until_it_closes(overlay: Overlay, root: Path) -> None:
    """A file open at the stop stays writable until its close, which unmounts the overlay and ends the worker.

    Everybody else is served meanwhile as well.
    """
    with open(root / "log", "wb", buffering=0) as job:
        job.write(b"one\n")
        assert overlay.client.stop(WAIT_SECONDS) is False
        assert mounts.overlay_at(os.fspath(root)) is not None
        job.write(b"two\n")
        os.fsync(job.fileno())
        assert (root / "log").read_bytes() == b"one\ntwo\n"
        assert overlay.process.poll() is None
    assert overlay.process.wait(WAIT_SECONDS) == 0
    assert mounts.overlay_at(os.fspath(root)) is None
    assert (root / "log").read_bytes() == b"one\ntwo\n"


def test_a_working_directory_survives_the_stop(overlay: Overlay, root: Path) -> None:
    """A process that works in the root keeps its working directory after the stop; its leaving ends the worker."""
    (root / "deep").mkdir()
    here = os.getcwd()
    try:
        os.chdir(root / "deep")
        assert overlay.client.stop(WAIT_SECONDS) is False
        assert os.getcwd() == str(root / "deep")
        Path("made").write_text("after the stop")
        assert os.path.samefile(".", root / "deep")
    finally:
        os.chdir(here)
    assert overlay.process.wait(WAIT_SECONDS) == 0
    assert mounts.overlay_at(os.fspath(root)) is None
    assert (root / "deep/made").read_text() == "after the stop"


def test_a_stop_that_waits_can_be_taken_back(overlay: Overlay, root: Path) -> None:
    """A worker that waits for somebody to leave serves on after `stay`, and ends at the next stop."""
    with open(root / "log", "wb"):
        assert overlay.client.stop(WAIT_SECONDS) is False
        overlay.client.stay()
    assert (root / "log").exists()
    assert overlay.stop() == 0


def test_an_open_handle_delays_a_stop_only_for_the_grace_time(overlay: Overlay, root: Path) -> None:
    """A handle that stays open keeps the worker no longer than the grace time, and synced data is there."""
    fd = os.open(root / "log", os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, b"kept")
        os.fsync(fd)
        assert overlay.stop(grace_seconds=0.2) == 0
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
            os.fsync(fd)
    finally:
        # Close flushes, and the server that would answer is gone.
        with contextlib.suppress(OSError):
            os.close(fd)
    assert (root / "log").read_bytes() == b"kept"


def test_umount_by_an_operator_is_a_clean_end(overlay: Overlay, root: Path) -> None:
    """An operator's umount makes the worker save its tracking and end with status 0."""
    subprocess.run(["umount", os.fspath(root)], check=True, timeout=WAIT_SECONDS)
    assert overlay.process.wait(WAIT_SECONDS) == 0
    assert (state_of(root) / "tracking").exists()


def test_the_end_of_a_worker_leaves_the_mount_of_its_successor_alone(root: Path, short_tmp: Path) -> None:
    """A worker whose mount was removed leaves alone a mount made since under the same device number."""
    # Another test's mount may get the number that became free: start again then.
    assert any(_successor_outlives_its_predecessor(root, short_tmp) for _ in range(_TRIES))


def _successor_outlives_its_predecessor(root: Path, short_tmp: Path) -> bool:
    """Check that the successor outlives it; return whether both mounts had the same device number.

    With different numbers the test shows nothing.
    """
    with Overlay(root, short_tmp / "w.sock") as overlay:
        first = mounts.overlay_at(os.fspath(root))
        overlay.process.send_signal(signal.SIGSTOP)
        try:
            # The command umount(8) asks the file system first.
            mounts.detach(os.fspath(root))
            successor = Overlay(root, short_tmp / "successor.sock")
        finally:
            overlay.process.send_signal(signal.SIGCONT)
        with successor:
            assert overlay.process.wait(WAIT_SECONDS) == 0
            second = mounts.overlay_at(os.fspath(root))
            assert first is not None
            assert second is not None
            assert (root / "before").read_text() == "was here before the mount"
            return first.device == second.device


def test_a_killed_worker_leaves_a_dead_mount_and_complete_files(overlay: Overlay, root: Path) -> None:
    """A mount whose worker got SIGKILL answers ENOTCONN, is found dead and comes off complete files."""
    (root / "synced").write_text("safe")
    overlay.process.kill()
    overlay.process.wait(WAIT_SECONDS)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.listdir(root)
    assert mounts.overlay_at(os.fspath(root)) is not None
    assert mounts.probe(os.fspath(root), WAIT_SECONDS) == "dead"
    with pytest.raises(WorkerUnreachable):
        overlay.client.status()
    mounts.detach(os.fspath(root))
    assert (root / "synced").read_text() == "safe"
    assert not (state_of(root) / "tracking").exists()


def test_a_successor_serves_the_same_root(root: Path, short_tmp: Path) -> None:
    """A new worker mounts the same root with a new session after a kill and after a clean stop."""
    sessions = set()
    for end in ("kill", "stop", "stop"):
        with Overlay(root, short_tmp / "w.sock") as overlay:
            sessions.add(overlay.client.status().session)
            (root / end).write_text(end)
            if end == "kill":
                overlay.kill()
    assert len(sessions) == 3
    assert sorted(name for name in os.listdir(root) if not name.startswith(".")) == ["before", "kill", "stop"]


def test_requests_in_flight_when_the_worker_dies_fail_and_do_not_hang(overlay: Overlay, root: Path) -> None:
    """Requests in flight when the worker is killed fail at once and never hang."""
    errors: list[int] = []
    started = threading.Barrier(4)

    def work(number: int) -> None:
        started.wait()
        try:
            while True:
                (root / f"f{number}").write_bytes(b"x" * 10000)
        except OSError as error:
            errors.append(error.errno or 0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    overlay.process.kill()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    overlay.kill()
    assert len(errors) == 3
    assert set(errors) <= {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}


def test_a_worker_that_cannot_start_gives_a_reason_and_mounts_nothing(short_tmp: Path) -> None:
    """A worker with an invalid root or socket directory ends with 1 and a reason, and mounts nothing."""
    file = short_tmp / "file"
    file.write_text("")
    (short_tmp / "dir").mkdir()
    for root, control in ((file, short_tmp / "c"), (short_tmp / "dir", short_tmp / "absent" / "c")):
        done = subprocess.run(
            [sys.executable, "-m", "ciuic.fuse_layer.worker", "--root", root, "--control", control],
            capture_output=True,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == 1
        assert b"overlay_failed" in done.stderr
        assert mounts.overlay_at(os.fspath(root)) is None


def test_a_hold_stops_changes_and_lets_reads_go_on(overlay: Overlay, root: Path) -> None:
    """A create waits while a hold is in force and completes after it; reads elsewhere do not wait."""
    (root / "sub").mkdir()
    client = overlay.client
    client.hold(WAIT_SECONDS)
    made = threading.Event()

    def create() -> None:
        (root / "sub" / "new").mkdir()
        made.set()

    thread = threading.Thread(target=create)
    thread.start()
    assert (root / "before").read_text() == "was here before the mount"
    assert sorted(os.listdir(root)) == ["before", "sub"]
    assert client.cut().epoch == 1
    assert not made.is_set()
    client.release()
    thread.join(WAIT_SECONDS)
    assert made.is_set()
    assert (root / "sub" / "new").is_dir()


def test_writers_are_named_while_they_write(overlay: Overlay, root: Path) -> None:
    """The worker names by relative path the files whose writes the kernel may keep.

    It leaves out files open for reading and files that the kernel writes straight to the backing file.
    """
    (root / "sub").mkdir()
    with open(root / "sub" / "out", "wb"), open(root / "sub" / "both", "w+b"), open(root / "before", "rb"):
        status = overlay.client.status()
        kept = [b"sub/both"] if status.passthrough else [b"sub/both", b"sub/out"]
        assert sorted(overlay.client.writers()) == kept
        assert status.open_files == 3
