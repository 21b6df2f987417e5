"""Snapshots of a mounted root under continuous load: capture stores what the mount showed at the cut.

A real overlay worker, the kernel's caches, the real capture process and a real repository. The users pause
only for the cut, to make the comparison possible, and work on while capture runs.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.capture_bench import snapshot_manifest
from support.overlay import Overlay, overlay_over
from support.stored import read_file
from support.trees import Manifest, assert_same, manifest

from ciuic.daemon.capture.job import CaptureJob, Done, RootJob, decode_message, encode_job
from ciuic.daemon.snapshots import flush_helper
from ciuic.repository import Repository
from ciuic.types import SnapshotId

BLOCK = 4096
FOLDERS = (b"", b"one", b"two", b"one/three")
NAMES = (b"a", b"b", b"\xff\n", b"d", b"e", b"f")
ROUNDS = 6
SECONDS = 60


class User(threading.Thread):
    """Random operations on files below a root, paused between two of them on request."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self._top = os.fsencode(root) + b"/"
        self._random = random.Random(seed)
        self._may_go_on = threading.Event()
        self._is_idle = threading.Event()
        self._ended = False
        self._open: list[int] = []
        self.done = 0

    def pause(self) -> None:
        self._is_idle.clear()
        self._may_go_on.clear()
        assert self._is_idle.wait(SECONDS)

    def go_on(self) -> None:
        self._may_go_on.set()

    def end(self) -> None:
        self._ended = True
        self._may_go_on.set()
        self.join(SECONDS)

    def run(self) -> None:
        actions = (
            *(self._write,) * 4,
            *(self._create,) * 3,
            *(self._append,) * 2,
            *(self._truncate, self._rename, self._rename, self._unlink, self._unlink, self._link),
            *(self._chmod, self._make_folder, self._remove_folder, self._keep_open, self._close_one),
        )
        while not self._ended:
            if not self._may_go_on.is_set():
                self._is_idle.set()
                self._may_go_on.wait()
                continue
            with contextlib.suppress(OSError):
                self._random.choice(actions)()
                self.done += 1
        while self._open:
            os.close(self._open.pop())

    def _path(self) -> bytes:
        folder = self._random.choice(FOLDERS)
        return self._top + (folder + b"/" if folder else b"") + self._random.choice(NAMES)

    def _data(self) -> bytes:
        return self._random.randbytes(self._random.choice((1, 100, BLOCK, 3 * BLOCK + 5)))

    def _create(self) -> None:
        with open(self._path(), "xb") as file:
            file.write(self._data())

    def _write(self) -> None:
        with open(self._path(), "r+b") as file:
            file.seek(self._random.randrange(6 * BLOCK))
            file.write(self._data())

    def _append(self) -> None:
        fd = os.open(self._path(), os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, self._data())
        finally:
            os.close(fd)

    def _truncate(self) -> None:
        os.truncate(self._path(), self._random.choice((0, 1, BLOCK, 2 * BLOCK + 9, 20 * BLOCK)))

    def _rename(self) -> None:
        os.rename(self._path(), self._path())

    def _unlink(self) -> None:
        os.unlink(self._path())

    def _link(self) -> None:
        os.link(self._path(), self._path(), follow_symlinks=False)

    def _chmod(self) -> None:
        os.chmod(self._path(), self._random.choice((0o600, 0o640, 0o755)))

    def _make_folder(self) -> None:
        os.mkdir(self._top + self._random.choice(FOLDERS[1:]))

    def _remove_folder(self) -> None:
        os.rmdir(self._top + self._random.choice(FOLDERS[1:]))

    def _keep_open(self) -> None:
        if len(self._open) < 5:
            fd = os.open(self._path(), os.O_RDWR)
            os.write(fd, b"begun")
            self._open.append(fd)

    def _close_one(self) -> None:
        if self._open:
            os.close(self._open.pop(0))


def flush(overlay: Overlay) -> None:
    """Flush the kernel's cached writes to the worker, as the daemon does before a cut."""
    names = b"\0".join(overlay.client.writers())
    helper = subprocess.run(
        [sys.executable, "-I", "-S", flush_helper.__file__, overlay.root], input=names, timeout=SECONDS
    )
    assert helper.returncode == 0


@contextlib.contextmanager
def users_of(root: Path, seed: int) -> Iterator[list[User]]:
    users = [User(root, seed * 10 + number) for number in range(2)]
    try:
        for user in users:
            user.start()
        yield users
    finally:
        for user in users:
            user.end()


def cut_and_look(overlay: Overlay, users: list[User], store: Path) -> tuple[CaptureJob, Manifest]:
    """Cut, and return the cut with what the mount showed then."""
    for user in users:
        user.pause()
    flush(overlay)
    cut = overlay.client.cut()
    expected = manifest(overlay.root)
    status = overlay.client.status()
    root = RootJob(
        path=os.fsencode(overlay.root),
        backing_fd=overlay.backing_fd,
        session=status.session,
        epoch=cut.epoch,
        worker_pid=overlay.process.pid,
    )
    return CaptureJob(
        repository=os.fspath(store), id=f"cs-{cut.epoch:06x}", time_ns=cut.cut_ns, host="h", roots=(root,)
    ), expected


@pytest.mark.mount
@pytest.mark.parametrize("seed", [1, 2])
def test_each_snapshot_equals_the_mount_at_its_cut(short_tmp: Path, seed: int) -> None:
    """Each of six successive snapshots, the first one full, holds what the mount showed at its cut."""
    root = short_tmp / "root"
    root.mkdir()
    store = short_tmp / "repository"
    Repository.create(store, block_size=BLOCK).close()
    with (
        overlay_over(root, short_tmp / "worker.sock", block_size=BLOCK) as overlay,
        users_of(root, seed) as users,
    ):
        for number in range(ROUNDS):
            for user in users:
                before = user.done
                user.go_on()
                while user.done < before + 50:
                    user.join(0.01)
            job, expected = cut_and_look(overlay, users, store)
            process = subprocess.Popen(
                [sys.executable, "-m", "ciuic.daemon.capture.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(overlay.backing_fd,),
            )
            for user in users:
                user.go_on()
            output, _ = process.communicate(encode_job(job), timeout=SECONDS)
            done = decode_message(output.splitlines()[-1])
            assert isinstance(done, Done), done
            assert done.errors == ()
            assert list(done.modes.values()) == ["full" if number == 0 else "tracked"]
            overlay.client.committed(job.roots[0].epoch)
            with Repository.open(store) as repository:
                record = repository.snapshots.load(SnapshotId(job.id)).roots[0]
                found = snapshot_manifest(repository.trees, partial(read_file, repository), record)
            assert_same(expected, found)
