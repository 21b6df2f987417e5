"""Job that makes every change twice, through an overlay and in a plain directory, and compares each result.

    python twin_job.py ROOT PLAIN SEED UNTIL

Several threads work in directories of their own and in a shared one, where an operation and its twin are one
step. Every operation that FUSE carries is tried, also those that fail: result, errno and the facts that
follow must be the plain directory's. Works until the file UNTIL exists. Prints a line of JSON (operations,
calls, long calls) and exits with 0, or with 1 and the difference.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import random
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

THREADS = 3
LONG_SECONDS = 0.005
_MAX_FILES = 6
_NAMES = "abcdefgh"
_SIZE = 1 << 16
# FUSE carries neither collapse nor insert (conformance.md).
_FALLOCATE_MODES = (0, 1, 3, 16)
_RENAME_FLAGS = (0, 0, 1, 2)
_libc = ctypes.CDLL(None, use_errno=True)
_MINE = 0xFFFFFFFF
_MOVED_BYTES = 9000
_EVENT = struct.Struct("iIII")
"""watch, mask, cookie, length of the name; name"""
_IN_ALL_EVENTS = 0xFFF


def _call_on_names(call: Callable[[str, str], Any], old: str, new: str, top: str) -> Any:
    """Call a function of two paths with two names below ``top``."""
    return call(f"{top}/{old}", f"{top}/{new}")


class Open(NamedTuple):
    """File that is open on both sides."""

    overlay: int
    plain: int
    flags: int
    top: str
    """Thread directory that it belongs to; one thread at a time uses what is shared."""
    what: str
    """Mode in which it was opened."""

    def close(self) -> None:
        os.close(self.overlay)
        os.close(self.plain)


class Differs(AssertionError):
    """Raised when the two sides differ."""


class Clock:
    """Time that the overlay's side took."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds: list[float] = []
        self.long: list[tuple[str, float, float]] = []

    def __call__(self, what: str, call: Callable[[], Any]) -> tuple[int, Any]:
        began = time.perf_counter()
        try:
            return 0, call()
        except OSError as error:
            return error.errno or -1, None
        finally:
            seconds = time.perf_counter() - began
            self.calls += 1
            if seconds >= LONG_SECONDS:
                self.long.append((what, time.time() - seconds, seconds))
            if not self.calls % 16:
                self.seconds.append(seconds)


class Twin:
    """Work of one thread."""

    def __init__(self, overlay: Path, plain: Path, seed: str, shared: threading.Lock) -> None:
        self._sides = overlay, plain
        self._choose = random.Random(seed)
        self._name = seed.rpartition("-")[2]
        self._shared = shared
        self._files: list[Open] = []
        self._referred: list[Open] = []
        """Files and directories by O_PATH descriptors."""
        self.clock = Clock()
        self.operations = 0
        self.history: list[str] = []
        for side in self._sides:
            (side / self._name).mkdir(exist_ok=True)

    # -- choosing and comparing -----------------------------------------------------------------------

    def step(self) -> None:
        """Do one operation."""
        kinds = [kind for kind in dir(self) if kind.startswith("do_")]
        operation = getattr(self, self._choose.choice(kinds))
        call = partial(self._watched, operation) if self._choose.random() < 0.2 else operation
        if self._choose.random() < 0.3:
            with self._shared:
                self._top = "shared"
                call()
        else:
            self._top = self._name
            call()
        self.operations += 1

    def _watched(self, operation: Callable[[], None]) -> None:
        """Carry an operation out under inotify(7), and compare the events."""
        watches = [_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) for _ in self._sides]
        try:
            for fd, side in zip(watches, self._sides, strict=True):
                _libc.inotify_add_watch(fd, os.fsencode(side / self._top), _IN_ALL_EVENTS)
            operation()
            seen = [_events(fd) for fd in watches]
        finally:
            for fd in watches:
                os.close(fd)
        if seen[0] != seen[1]:
            raise Differs(f"events of {self.history[-1]}: overlay {seen[0]!r}, plain {seen[1]!r}")

    def _path(self) -> str:
        depth = self._choose.choice((1, 1, 1, 2, 2, 3))
        return "/".join([self._top, *(self._choose.choice(_NAMES) for _ in range(depth))])

    def _call_both(self, what: str, call: Callable[[str], Any]) -> Any:
        """Carry ``call`` out with the top of each side; return the common value."""
        overlay, plain = self._sides
        return self._compare(what, lambda: call(str(overlay)), lambda: call(str(plain)))

    def _handles(self, what: str, file: Open, call: Callable[[int], Any]) -> Any:
        what = f"{what} ({file.what}, {file.overlay})"
        return self._compare(what, lambda: call(file.overlay), lambda: call(file.plain))

    def _compare(self, what: str, overlay: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        one = self.clock(what, overlay)
        try:
            other: tuple[int, Any] = 0, plain()
        except OSError as error:
            other = error.errno or -1, None
        self.history.append(f"{what} -> {errno.errorcode.get(other[0], other[0])}")
        del self.history[:-60]
        if one != other:
            raise Differs(f"{what}: overlay {one!r}, plain {other!r}")
        return one[1] if one[0] == 0 else None

    def _file(self) -> Open | None:
        mine = [file for file in self._files if file.top == self._top]
        return self._choose.choice(mine) if mine else None

    def _keep(self, what: str, flags: int, call: Callable[[str], int]) -> None:
        """Open on both sides, and keep the pair for a while."""
        found: list[int] = []
        self._call_both(what, lambda top: found.append(call(top)))
        if len(found) == 2:
            self._files.append(Open(found[0], found[1], flags, self._top, what))
        elif found:
            raise Differs(f"{what}: opened on one side")
        mine = [file for file in self._files if file.top == self._top]
        if len(mine) > _MAX_FILES:
            self._files.remove(mine[0])
            mine[0].close()

    # -- names ----------------------------------------------------------------------------------------

    def do_create(self) -> None:
        path = self._path()
        flags = os.O_CREAT | self._choose.choice((os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_APPEND))
        # The name may be that of a pipe.
        flags |= os.O_NONBLOCK | self._choose.choice((0, os.O_EXCL, os.O_TRUNC))
        mode = self._choose.choice((0o600, 0o644, 0o755))
        self._keep(f"create {path} {flags:o}", flags, lambda top: os.open(f"{top}/{path}", flags, mode))

    def do_open(self) -> None:
        path = self._path()
        flags = self._choose.choice(
            (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_TRUNC)
        )
        flags |= os.O_NONBLOCK | os.O_NOFOLLOW
        self._keep(f"open {path} {flags:o}", flags, lambda top: os.open(f"{top}/{path}", flags))

    def do_nameless(self) -> None:
        flags = os.O_TMPFILE | os.O_RDWR
        self._keep("tmpfile", flags, lambda top: os.open(f"{top}/{self._top}", flags, 0o600))
        if self._choose.random() < 0.5 and self._files:
            file, path = self._files[-1], self._path()
            if file.flags == flags:
                self._pair(f"name the tmpfile {path}", file, path)

    def _pair(self, what: str, file: Open, path: str) -> None:
        overlay, plain = self._sides

        # With dir_fd CPython calls linkat(2), which alone can follow the magic link.
        def linked(fd: int, top: Path) -> None:
            where = os.open(top, os.O_PATH | os.O_DIRECTORY)
            try:
                os.link(f"/proc/self/fd/{fd}", path, dst_dir_fd=where, follow_symlinks=True)
            finally:
                os.close(where)

        self._compare(what, lambda: linked(file.overlay, overlay), lambda: linked(file.plain, plain))

    def do_mkdir(self) -> None:
        path = self._path()
        self._call_both(f"mkdir {path}", lambda top: os.mkdir(f"{top}/{path}", 0o755))

    def do_mkfifo(self) -> None:
        path = self._path()
        self._call_both(f"mkfifo {path}", lambda top: os.mkfifo(f"{top}/{path}", 0o640))

    def do_symlink(self) -> None:
        path = self._path()
        self._call_both(f"symlink {path}", lambda top: os.symlink("elsewhere", f"{top}/{path}"))
        self._call_both(f"readlink {path}", lambda top: os.readlink(f"{top}/{path}"))

    def do_link(self) -> None:
        old, new = self._path(), self._path()
        self._call_both(f"link {old} {new}", lambda top: os.link(f"{top}/{old}", f"{top}/{new}"))

    def do_unlink(self) -> None:
        path = self._path()
        self._call_both(f"unlink {path}", lambda top: os.unlink(f"{top}/{path}"))

    def do_rmdir(self) -> None:
        path = self._path()
        self._call_both(f"rmdir {path}", lambda top: os.rmdir(f"{top}/{path}"))

    def do_rename(self) -> None:
        old, new, flags = self._path(), self._path(), self._choose.choice(_RENAME_FLAGS)

        def rename(top: str) -> None:
            result = _libc.renameat2(-100, f"{top}/{old}".encode(), -100, f"{top}/{new}".encode(), flags)
            if result:
                raise OSError(ctypes.get_errno(), "")

        self._call_both(f"rename {old} {new} {flags}", rename)

    def do_rename_then_link(self) -> None:
        """Rename a file and link the old name to it again, as a program does that keeps a backup."""
        path = self._path()
        for what in ("rename", "link", "unlink"):
            old, new = (path, f"{path}.x") if what == "rename" else (f"{path}.x", path)
            if what == "unlink":
                self._call_both(f"unlink {old}", lambda top, old=old: os.unlink(f"{top}/{old}"))  # type: ignore[misc]
            else:
                call = getattr(os, what)
                self._call_both(f"{what} {old} {new}", partial(_call_on_names, call, old, new))

    def do_refer(self) -> None:
        """Refer to a file by an O_PATH descriptor, and use one that has outlived other operations."""
        path, found = self._path(), list[int]()
        flags = os.O_PATH | os.O_NOFOLLOW
        self._call_both(f"refer to {path}", lambda top: found.append(os.open(f"{top}/{path}", flags)))
        if len(found) == 2:
            self._referred.append(Open(found[0], found[1], flags, self._top, f"O_PATH {path}"))
        mine = [file for file in self._referred if file.top == self._top]
        if len(mine) > _MAX_FILES:
            self._referred.remove(mine[0])
            mine.pop(0).close()
        # A file without a name may be gone (conformance.md).
        named = [file for file in mine if os.fstat(file.plain).st_nlink]
        if named:
            self._handles("use", self._choose.choice(named), _use_referred)

    # -- attributes -----------------------------------------------------------------------------------

    def do_stat(self) -> None:
        path = self._path()
        self._call_both(f"stat {path}", lambda top: _facts(os.lstat(f"{top}/{path}")))

    def do_chmod(self) -> None:
        path, mode = self._path(), self._choose.choice((0o600, 0o644, 0o750, 0o700))

        def chmod(top: str) -> tuple[int, ...]:
            if stat.S_ISLNK(os.lstat(f"{top}/{path}").st_mode):
                return ()
            os.chmod(f"{top}/{path}", mode)
            return _facts(os.lstat(f"{top}/{path}"))

        self._call_both(f"chmod {path}", chmod)

    def do_utimens(self) -> None:
        path, when = self._path(), self._choose.randrange(1 << 60)

        def utime(top: str) -> int:
            os.utime(f"{top}/{path}", ns=(when, when), follow_symlinks=False)
            return os.lstat(f"{top}/{path}").st_mtime_ns

        self._call_both(f"utimens {path}", utime)

    def do_chown(self) -> None:
        path, uid = self._path(), self._choose.choice((0, 1000))

        def chown(top: str) -> tuple[int, ...]:
            os.lchown(f"{top}/{path}", uid, -1)
            return _facts(os.lstat(f"{top}/{path}"))

        self._call_both(f"chown {path}", chown)

    def do_xattr(self) -> None:
        path, name = self._path(), f"user.{self._choose.choice('xyz')}"
        value, flags = self._choose.randbytes(4), self._choose.choice((0, os.XATTR_CREATE, os.XATTR_REPLACE))
        kind = self._choose.choice(("set", "set", "get", "remove", "list"))

        def change(top: str) -> Any:
            where = f"{top}/{path}"
            if kind == "set":
                return os.setxattr(where, name, value, flags, follow_symlinks=False)
            if kind == "get":
                return os.getxattr(where, name, follow_symlinks=False)
            if kind == "remove":
                return os.removexattr(where, name, follow_symlinks=False)
            return sorted(os.listxattr(where, follow_symlinks=False))

        self._call_both(f"{kind} xattr {path} {name} {flags}", change)

    def do_acl(self) -> None:
        path, user = self._path(), self._choose.randrange(1000, 1004)
        entries = ((1, 6, _MINE), (2, 4, user), (4, 4, _MINE), (16, 4, _MINE), (32, 0, _MINE))
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)

        def set_acl(top: str) -> bytes:
            if not stat.S_ISREG(os.lstat(f"{top}/{path}").st_mode):
                return b""
            os.setxattr(f"{top}/{path}", "system.posix_acl_access", acl)
            return os.getxattr(f"{top}/{path}", "system.posix_acl_access")

        self._call_both(f"acl {path}", set_acl)

    def do_listing(self) -> None:
        path = self._choose.choice((self._top, self._path()))
        self._call_both(f"listdir {path}", lambda top: sorted(os.listdir(f"{top}/{path}")))

    def do_listing_during_changes(self) -> None:
        """List a directory during changes: each unchanged name is listed once."""
        stay, goes = [f"{self._top}/{name}" for name in ("stays", "goes")]

        def listing(top: str) -> int:
            for path in (stay, goes):
                os.close(os.open(f"{top}/{path}", os.O_WRONLY | os.O_CREAT, 0o644))
            with os.scandir(f"{top}/{self._top}") as entries:
                seen = [entry.name for entry in [next(entries)]]
                os.unlink(f"{top}/{goes}")
                seen += [entry.name for entry in entries]
            os.unlink(f"{top}/{stay}")
            return seen.count("stays")

        self._call_both("listing during changes", listing)

    # -- content --------------------------------------------------------------------------------------

    def do_write(self) -> None:
        file = self._file()
        if file is None:
            return
        data, offset = (
            self._choose.randbytes(self._choose.choice((1, 100, 5000))),
            self._choose.randrange(_SIZE),
        )
        self._handles(f"write {len(data)} at {offset}", file, lambda fd: os.pwrite(fd, data, offset))

    def do_read(self) -> None:
        file = self._file()
        if file is not None:
            offset = self._choose.randrange(_SIZE)
            self._handles(f"read at {offset}", file, lambda fd: os.pread(fd, 8000, offset))

    def do_read_whole(self) -> None:
        path = self._path()

        def read(top: str) -> bytes:
            fd = os.open(f"{top}/{path}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                return b"" if not stat.S_ISREG(os.fstat(fd).st_mode) else os.read(fd, 4 * _SIZE)
            finally:
                os.close(fd)

        self._call_both(f"content of {path}", read)

    def do_transfer(self) -> None:
        """Copy between two files that are open, within the kernel."""
        source, target = self._file(), self._file()
        if source is None or target is None:
            return
        move, offset = self._choose.choice((_send, _splice, _copy_range)), self._choose.randrange(_SIZE)
        self._compare(
            f"{move.__name__} from {offset} ({source.what}, {target.what})",
            lambda: move(source.overlay, target.overlay, offset),
            lambda: move(source.plain, target.plain, offset),
        )

    def do_truncate(self) -> None:
        path, size, file = self._path(), self._choose.randrange(_SIZE), self._file()
        if file is not None and self._choose.random() < 0.5:
            self._handles(f"ftruncate {size}", file, lambda fd: os.ftruncate(fd, size))
        else:

            def truncate(top: str) -> None:
                if stat.S_ISREG(os.lstat(f"{top}/{path}").st_mode):
                    os.truncate(f"{top}/{path}", size)

            self._call_both(f"truncate {path} {size}", truncate)

    def do_fallocate(self) -> None:
        file, mode = self._file(), self._choose.choice(_FALLOCATE_MODES)
        if file is None:
            return
        offset, length = self._choose.randrange(8) * 4096, (1 + self._choose.randrange(4)) * 4096

        def allocate(fd: int) -> int:
            if _libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
                raise OSError(ctypes.get_errno(), "")
            return os.fstat(fd).st_size

        self._handles(f"fallocate {mode} {offset} {length}", file, allocate)

    def do_mmap(self) -> None:
        file = self._file()
        if file is None or file.flags & os.O_ACCMODE != os.O_RDWR:
            return
        data, at = self._choose.randbytes(100), self._choose.randrange(3000)

        def store(fd: int) -> bytes:
            if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_size < 4096:
                return b""
            with mmap.mmap(fd, 4096) as mapped:
                mapped[at : at + 100] = data
                mapped.flush()
                return bytes(mapped[:])

        self._handles("mapped store", file, store)

    def do_fsync(self) -> None:
        file = self._file()
        if file is not None:
            self._handles("fsync", file, os.fsync)

    def do_fstat(self) -> None:
        file = self._file()
        if file is not None:
            self._handles("fstat", file, lambda fd: _facts(os.fstat(fd)))

    def do_lock(self) -> None:
        file, other = self._file(), self._file()
        if file is None or other is None:
            return
        kind = self._choose.choice((fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN)) | fcntl.LOCK_NB
        self._handles("flock", file, lambda fd: fcntl.flock(fd, kind))
        self._handles("flock again", other, lambda fd: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB))
        for each in dict.fromkeys((file, other)):
            self._handles("unlock", each, lambda fd: fcntl.flock(fd, fcntl.LOCK_UN))

    def do_close(self) -> None:
        file = self._file()
        if file is not None:
            self._files.remove(file)
            self._handles("close", file, os.close)

    def end(self) -> None:
        """Check that both trees are the same, to the byte."""
        # Another thread may watch the shared directory still.
        with self._shared:
            for file in (*self._files, *self._referred):
                file.close()
        self._top = self._name
        for folder, folders, files in os.walk(self._sides[1] / self._name):
            for name in (*folders, *files):
                path = os.path.relpath(os.path.join(folder, name), self._sides[1])
                self._call_both(
                    f"at the end {path}",
                    lambda top, path=path: _facts(os.lstat(f"{top}/{path}")),  # type: ignore[misc]
                )
        self._call_both("all names", lambda top: sorted(_names(f"{top}/{self._name}")))


def _names(top: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(at, name), top)
        for at, folders, files in os.walk(top)
        for name in (*folders, *files)
    ]


def _events(watch: int) -> list[tuple[int, bool, bytes]]:
    """Return the events of an inotify descriptor: mask, whether it belongs to a rename, and name."""
    events, at = [], 0
    try:
        data = os.read(watch, 1 << 16)
    except BlockingIOError:
        return []
    while at < len(data):
        _, mask, cookie, size = _EVENT.unpack_from(data, at)
        at += _EVENT.size + size
        name = data[at - size : at].rstrip(b"\0")
        # ext4 makes the name of a file without one from its number (conformance.md).
        events.append((mask, cookie != 0, b"/" if name.startswith(b"#") else name))
    return events


def _all_moved(move: Callable[[int], int]) -> int:
    """Move some kilobytes in as many calls as it takes; ``move`` gets how many bytes were moved before."""
    moved = 0
    while moved < _MOVED_BYTES and (count := move(moved)):
        moved += count
    return moved


def _send(source: int, target: int, offset: int) -> int:
    """Copy by sendfile(2), to the target's position."""
    return _all_moved(lambda moved: os.sendfile(target, source, offset + moved, _MOVED_BYTES - moved))


def _copy_range(source: int, target: int, offset: int) -> int:
    """Copy by copy_file_range(2), to the target's beginning."""
    return _all_moved(
        lambda moved: os.copy_file_range(source, target, _MOVED_BYTES - moved, offset + moved, moved)
    )


def _splice(source: int, target: int, offset: int) -> int:
    """Copy by splice(2) through a pipe, to the target's beginning."""
    out, into = os.pipe()

    def move(moved: int) -> int:
        count = left = os.splice(source, into, _MOVED_BYTES - moved, offset_src=offset + moved)
        while left:
            left -= os.splice(out, target, left, offset_dst=moved + count - left)
        return count

    try:
        return _all_moved(move)
    finally:
        os.close(out)
        os.close(into)


def _use_referred(fd: int) -> tuple[Any, ...]:
    """Return the facts of what an O_PATH descriptor leads to, and the content of a directory or file."""
    st, path = os.fstat(fd), f"/proc/self/fd/{fd}"
    if stat.S_ISDIR(st.st_mode):
        return *_facts(st), sorted(os.listdir(path))
    if stat.S_ISREG(st.st_mode):
        opened = os.open(path, os.O_RDONLY)
        try:
            return *_facts(st), os.read(opened, 4 * _SIZE)
        finally:
            os.close(opened)
    return _facts(st)


def _facts(st: os.stat_result) -> tuple[int, ...]:
    size = st.st_size if not stat.S_ISDIR(st.st_mode) else 0
    return st.st_mode, st.st_nlink, size, st.st_uid, st.st_gid


def _work(twin: Twin, until: Path, failures: list[str]) -> None:
    try:
        while not until.exists() and not failures:
            for _ in range(20):
                twin.step()
        if not failures:
            twin.end()
    except BaseException as error:
        text = "\n".join([*twin.history, "".join(traceback.format_exception(error))])
        failures.append(text)


def main() -> int:
    overlay, plain, seed, until = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    os.umask(0o022)
    shared, failures = threading.Lock(), list[str]()
    for side in (overlay, plain):
        with contextlib.suppress(FileExistsError):
            (side / "shared").mkdir()
    twins = [Twin(overlay, plain, f"{seed}-{number}", shared) for number in range(THREADS)]
    threads = [threading.Thread(target=_work, args=(twin, until, failures)) for twin in twins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures[:1]:
        sys.stderr.write(failure)
    clocks = [twin.clock for twin in twins]
    report = {
        "operations": sum(twin.operations for twin in twins),
        "calls": sum(clock.calls for clock in clocks),
        "long": [call for clock in clocks for call in clock.long],
        "sample": [round(seconds, 6) for clock in clocks for seconds in clock.seconds][-20000:],
    }
    sys.stdout.write(json.dumps(report))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
