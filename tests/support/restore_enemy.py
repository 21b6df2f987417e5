"""Enemy of restores that owns the destination and exchanges names there for others' files.

System calls of a restore have a hook before and after each, for an enemy or an observer. Deterministic where a race would be luck: whatever can happen between two calls of another process can happen
here between any two chosen calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from support.restoring import take
from support.trees import assert_same, manifest

from ciuic.errors import CiuicError
from ciuic.fuse_layer.system.syscalls import RENAME_EXCHANGE, renameat2
from ciuic.repository import Repository
from ciuic.restore import (
    Overwrite,
    attributes,
    content,
    destination,
    destination_directories,
    execute,
    journal,
    new_files,
    plan_restore,
    run,
    workers,
)
from ciuic.types import Snapshot

_MODULES = (
    attributes,
    content,
    destination,
    destination_directories,
    journal,
    workers,
    new_files,
    new_files,
    destination_directories,
    run,
    run,
    run,
    destination_directories,
    destination,
)
CALLS = frozenset(
    [
        "open",
        "mkdir",
        "makedirs",
        "rename",
        "unlink",
        "rmdir",
        "stat",
        "fstat",
        "chown",
        "chmod",
        "utime",
        "setxattr",
        "removexattr",
        "listxattr",
        "getxattr",
        "link",
        "symlink",
        "mknod",
        "listdir",
        "readlink",
        "ftruncate",
        "fsync",
        "pread",
        "pwrite",
        "close",
    ]
)
Hook = Callable[[str, int], None]
"""Called with the name of the call and its number in the run."""


class _Hooked:
    """Module ``os``, or libc, with a hook before and after each of the calls named."""

    def __init__(
        self, real: Any, names: frozenset[str], step: Callable[[str, Callable[[], Any]], Any]
    ) -> None:
        self._real, self._names, self._step = real, names, step

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in self._names:
            return value
        return lambda *args, **options: self._step(name, lambda: value(*args, **options))


@contextmanager
def hooked(*, before: Hook | None = None, after: Hook | None = None) -> Iterator[Callable[[], int]]:
    """Make restores call the hooks for the block, one at a time; yield the number of calls so far."""
    lock = threading.RLock()
    count = 0

    def step(name: str, call: Callable[[], Any]) -> Any:
        nonlocal count
        with lock:
            count += 1
            number = count
            if before is not None:
                before(name, number)
            try:
                return call()
            finally:
                if after is not None:
                    after(name, number)

    with ExitStack() as stack:
        fake = _Hooked(os, CALLS, step)
        for module in _MODULES:
            if hasattr(module, "os"):
                stack.enter_context(mock.patch.object(module, "os", fake))
        libc = _Hooked(destination._libc(), frozenset(("renameat2",)), step)
        stack.enter_context(mock.patch.object(destination, "_libc", return_value=libc))
        yield lambda: count


OWNER, GROUP = 1234, 4321

SECRET = b"nobody in the destination may ever read this"


class Enemy:
    """Owner of the destination that exchanges names between two system calls."""

    def __init__(self, place: Path, dest: Path) -> None:
        self.dest = dest
        self.outside = place / "outside"
        (self.outside / "folder/below").mkdir(parents=True)
        for name in (
            "file",
            "folder/file",
            "folder/below/deep",
            "folder/gone",
            "linked",
            "folder/linked",
            "extra",
        ):
            (self.outside / name).write_bytes(SECRET)
            (self.outside / name).chmod(0o600)
        self.outside.chmod(0o700)
        self.links = place / "links"
        self.links.mkdir()
        for target in ("", "/folder", "/folder/below", "/file", "/folder/file"):
            os.symlink(f"{self.outside}{target}", self.links / f"to{target.replace('/', '-')}")
        private = self.links / "private"
        private.mkdir(mode=0o700)
        (private / "note").write_bytes(b"in a directory of somebody else")
        self._private = private.stat()

    def swap(self, victim: str, link: str) -> None:
        """Exchange a name in the destination with a symbolic link, if that name exists now."""
        with suppress(OSError):
            renameat2(
                -100, os.fsencode(self.dest / victim), -100, os.fsencode(self.links / link), RENAME_EXCHANGE
            )

    def check_private(self) -> None:
        """Check that the other user's directory is unchanged, wherever it was moved."""
        for folder, _, files in os.walk(self.links.parent):
            now = os.stat(folder)
            if now.st_ino == self._private.st_ino:
                assert (now.st_mode, now.st_uid, files) == (self._private.st_mode, 0, ["note"])
                return
        raise AssertionError("somebody else's directory is gone")

    def temporary(self) -> str | None:
        """Return some unfinished file."""
        for folder, folders, files in os.walk(self.dest):
            for name in (*files, *folders):
                if name.startswith(".ciuic-restore-"):
                    return os.path.relpath(os.path.join(folder, name), self.dest)
        return None


def make_tree(root: Path) -> None:
    (root / "folder/below").mkdir(parents=True)
    for name in ("file", "folder/file", "folder/below/deep"):
        (root / name).write_bytes(name.encode() * 300)
        os.chown(root / name, OWNER, GROUP)
    (root / "linked").write_bytes(b"two names")
    os.link(root / "linked", root / "folder/linked")
    os.symlink("file", root / "symlink")
    for folder in (root, root / "folder", root / "folder/below"):
        os.chown(folder, OWNER, GROUP)
        folder.chmod(0o777)


SWAPS = (
    ("root", "to"),
    ("root/folder", "to-folder"),
    ("root/folder/below", "to-folder-below"),
    ("root/folder/below", "private"),
    ("root/file", "to-file"),
    ("root/folder/file", "to-folder-file"),
    ("root/extra", "to-folder"),
    ("temporary", "to-folder-file"),
    ("temporary", "to-folder"),
)


def attacked(
    place: Path, repository: Repository, snapshot: Snapshot, swap: tuple[str, str], at: int, back: int
) -> int:
    """Run one restore with an exchange before call ``at``; return the number of calls.

    The exchange is undone ``back`` calls later (0: never).
    """
    top = place / "attack"
    dest = top / "dest"
    (dest / "root/folder").mkdir(parents=True)
    (dest / "root/file").write_bytes(b"older")
    (dest / "root/folder/gone").write_bytes(b"to be deleted")
    (dest / "root/extra").mkdir()
    (dest / "root/extra/x").write_bytes(b"to be deleted")
    enemy = Enemy(top, dest)
    kept = manifest(enemy.outside)
    done: list[str] = []

    def before(call: str, number: int) -> None:
        if number == at or (back and done and number == at + back):
            victim = (
                (done[0] if done else enemy.temporary() or "not there") if swap[0] == "temporary" else swap[0]
            )
            done.append(victim)
            enemy.swap(victim, swap[1])

    try:
        with hooked(before=before) as count, suppress(CiuicError):
            restore(repository, snapshot, place / "root", dest)
        after = manifest(enemy.outside)
        assert_same(kept, after)
        enemy.check_private()
        nothing_came_in(dest)
        return count()
    finally:
        shutil.rmtree(top)


def nothing_came_in(dest: Path) -> None:
    """Check that no file in the destination holds data from outside."""
    for folder, _, files in os.walk(dest):
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                assert SECRET not in path.read_bytes(), path


def restore(repository: Repository, snapshot: Snapshot, source: Path, dest: Path) -> None:
    """Restore everything over the existing files and delete all others."""
    plan = plan_restore(
        repository,
        snapshot,
        [os.fsencode(source)],
        os.fsencode(dest),
        overwrite=Overwrite.ALWAYS,
        delete=True,
    )
    execute(plan)


class Raced(NamedTuple):
    """Outcome of a race."""

    restores: int
    exchanges: int


_LOOP = """
import ctypes, os, random, signal, sys
dest, links, seed, uid, gid = sys.argv[1:4] + [int(n) for n in sys.argv[4:]]
os.setgroups([]); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
libc, dice, done, go = ctypes.CDLL(None), random.Random(seed), 0, True
def stop(*ignored):
    global go
    go = False
signal.signal(signal.SIGTERM, stop)
targets = [os.fsencode(os.path.join(links, name)) for name in os.listdir(links)]
folders = [os.path.join(dest, name) for name in ("root", "root/folder", "root/folder/below")]
print("ready", flush=True)
while go:
    folder = dice.choice(folders)
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    victim = os.path.join(folder, dice.choice(names)) if names and dice.random() < 0.6 else dice.choice(folders)
    link = dice.choice(targets)
    if libc.renameat2(-100, os.fsencode(victim), -100, link, 2) == 0:
        done += 1
        if dice.random() < 0.8:
            libc.renameat2(-100, os.fsencode(victim), -100, link, 2)
print(done, flush=True)
"""


def race(place: Path, seconds: float, seed: int) -> Raced:
    """Restore as root repeatedly into a directory whose owner exchanges names in a loop.

    Raises AssertionError if anything outside was touched or came in.
    """
    root, top = place / "root", place / "race"
    root.mkdir()
    make_tree(root)
    restores = exchanges = 0
    with Repository.create(place / "race-repository", block_size=4096) as repository:
        snapshot = take(repository, root)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            dest = top / "dest"
            (dest / "root").mkdir(parents=True)
            enemy = Enemy(top, dest)
            for path in (enemy.links, dest, dest / "root"):
                os.chown(path, OWNER, GROUP)
                path.chmod(0o755)
            done, swapped = _race_once(
                repository, snapshot, root, enemy, min(end, time.monotonic() + 2), seed + restores
            )
            restores, exchanges = restores + done, exchanges + swapped
            shutil.rmtree(top)
    return Raced(restores, exchanges)


def _race_once(
    repository: Repository, snapshot: Snapshot, root: Path, enemy: Enemy, end: float, seed: int
) -> tuple[int, int]:
    kept, restores = manifest(enemy.outside), 0
    arguments = (str(enemy.dest), str(enemy.links), str(seed), str(OWNER), str(GROUP))
    process = subprocess.Popen([sys.executable, "-c", _LOOP, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while time.monotonic() < end:
            # Refusals are right: the destination changes during the restore.
            with suppress(CiuicError, OSError):
                restore(repository, snapshot, root, enemy.dest)
            restores += 1
    finally:
        process.terminate()
        text, _ = process.communicate(timeout=60)
    assert_same(kept, manifest(enemy.outside))
    nothing_came_in(enemy.dest)
    return restores, int(text.split()[-1])
