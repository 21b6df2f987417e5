"""The same operations on a plain directory and through the mount: results, errnos, attributes and contents agree.

Runs as several users and umasks, with open handles, removed files, hard links and mappings. What the two sides are
allowed to differ in is listed in docs/conformance.md and nowhere masked here except for times that nobody set.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.overlay import Overlay, overlay_over

from ciuic.fuse_layer import syscalls

pytestmark = pytest.mark.mount

SLOTS = 3
NAMES = [
    "a",
    "b",
    "c",
    "sub/a",
    "sub/b",
    "sub/deep/a",
    "sub",
    "sub/deep",
    "other",
    "a/under-a-file",
    "n" * 255,
    "n" * 256,
]
PATHS = st.sampled_from(NAMES)
USERS = st.sampled_from([0, 0, 0, 65534])
UMASKS = st.sampled_from([0, 0o022, 0o027])
"""None that takes group execution alone: set-group-id without it is a matter of its own (docs/conformance.md)."""
MODES = st.sampled_from([0o644, 0o600, 0o777, 0o000, 0o4755, 0o2755, 0o6777, 0o1777, 0o444])
SIZES = st.sampled_from([0, 1, 100, 4095, 4096, 4097, 10_000, 300_000])
DATA = st.binary(min_size=0, max_size=40).map(lambda piece: piece * 300)
TIMES = st.integers(0, 4_000_000_000_000_000_000)
FLAGS = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_RDWR,
        os.O_WRONLY,
        os.O_RDWR | os.O_CREAT,
        os.O_RDWR | os.O_CREAT,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        os.O_RDWR | os.O_TRUNC,
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        os.O_RDWR | os.O_APPEND,
        os.O_RDONLY | os.O_DIRECTORY,
        os.O_RDONLY | os.O_NOFOLLOW,
    ]
)
XATTRS = st.sampled_from(["user.one", "user.two", "trusted.three"])


class Op(NamedTuple):
    """One operation: what, and its arguments."""

    what: str
    args: tuple[Any, ...]
    uid: int
    umask: int


def _op(what: str, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Op]:
    return st.builds(Op, st.just(what), st.tuples(*args), USERS, UMASKS)


SLOT = st.integers(0, SLOTS - 1)
OPS = st.one_of(
    _op("mkdir", PATHS, MODES),
    _op("mkdir", st.sampled_from(["sub", "sub/deep", "other"]), st.just(0o777)),
    _op("rmdir", PATHS),
    _op("unlink", PATHS),
    _op("rename", PATHS, PATHS, st.sampled_from([0, 0, 1, 2])),
    _op("link", PATHS, PATHS),
    _op("symlink", st.sampled_from(["a", "sub", "gone", "../up", "x" * 200]), PATHS),
    _op("mknod", PATHS, st.sampled_from([stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFREG]), MODES),
    _op("open", PATHS, FLAGS, MODES, SLOT),
    _op("open", st.sampled_from(["a", "b", "sub/a"]), FLAGS, st.just(0o666), SLOT),
    _op("close", SLOT),
    _op("write", SLOT, DATA),
    _op("pwrite", SLOT, SIZES, DATA),
    _op("read", SLOT, SIZES),
    _op("pread", SLOT, SIZES, SIZES),
    _op("ftruncate", SLOT, SIZES),
    _op("truncate", PATHS, SIZES),
    _op("fstat", SLOT),
    _op("fchmod", SLOT, MODES),
    _op("fsync", SLOT),
    _op("map", SLOT, st.integers(0, 5000), st.binary(min_size=1, max_size=50)),
    _op("chmod", PATHS, MODES),
    _op("chown", PATHS, st.sampled_from([-1, 0, 65534]), st.sampled_from([-1, 0, 65534])),
    _op("utime", PATHS, TIMES, TIMES),
    _op(
        "setxattr",
        PATHS,
        XATTRS,
        st.binary(max_size=60),
        st.sampled_from([0, os.XATTR_CREATE, os.XATTR_REPLACE]),
    ),
    _op("getxattr", PATHS, XATTRS),
    _op("listxattr", PATHS),
    _op("removexattr", PATHS, XATTRS),
    _op("lstat", PATHS),
    _op("stat", PATHS),
    _op("readlink", PATHS),
    _op("listdir", PATHS),
    _op("whole", PATHS),
)


def _attributes(st_: os.stat_result) -> tuple[int, ...]:
    size = 0 if stat.S_ISDIR(st_.st_mode) else st_.st_size
    return (st_.st_mode, st_.st_nlink, st_.st_uid, st_.st_gid, size, st_.st_rdev)


class Side:
    """One of the two directories, and the handles open on it."""

    def __init__(self, top: Path) -> None:
        self.top = os.fspath(top)
        self.slots: list[int | None] = [None] * SLOTS

    def path(self, name: str) -> str:
        return f"{self.top}/{name}"

    def fd(self, slot: int) -> int:
        fd = self.slots[slot]
        if fd is None:
            raise OSError(errno.EBADF, "slot is empty")
        return fd

    def close_all(self) -> None:
        for slot in range(SLOTS):
            with contextlib.suppress(OSError):
                self.do_close(slot)

    def do_mkdir(self, name: str, mode: int) -> None:
        os.mkdir(self.path(name), mode)

    def do_rmdir(self, name: str) -> None:
        os.rmdir(self.path(name))

    def do_unlink(self, name: str) -> None:
        os.unlink(self.path(name))

    def do_rename(self, old: str, new: str, flags: int) -> None:
        syscalls.renameat2(-100, os.fsencode(self.path(old)), -100, os.fsencode(self.path(new)), flags)

    def do_link(self, old: str, new: str) -> None:
        os.link(self.path(old), self.path(new), follow_symlinks=False)

    def do_symlink(self, target: str, name: str) -> None:
        os.symlink(target, self.path(name))

    def do_mknod(self, name: str, kind: int, mode: int) -> None:
        os.mknod(self.path(name), kind | mode, os.makedev(1, 3) if kind == stat.S_IFCHR else 0)

    def do_open(self, name: str, flags: int, mode: int, slot: int) -> None:
        # Without O_NONBLOCK, opening a fifo would wait for a partner.
        fd = os.open(self.path(name), flags | os.O_NONBLOCK, mode)
        with contextlib.suppress(OSError):
            self.do_close(slot)
        self.slots[slot] = fd

    def do_close(self, slot: int) -> None:
        fd = self.fd(slot)
        self.slots[slot] = None
        os.close(fd)

    def do_write(self, slot: int, data: bytes) -> int:
        return os.write(self.fd(slot), data)

    def do_pwrite(self, slot: int, offset: int, data: bytes) -> int:
        return os.pwrite(self.fd(slot), data, offset)

    def do_read(self, slot: int, size: int) -> bytes:
        return os.read(self.fd(slot), size)

    def do_pread(self, slot: int, size: int, offset: int) -> bytes:
        return os.pread(self.fd(slot), size, offset)

    def do_ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self.fd(slot), size)

    def do_truncate(self, name: str, size: int) -> None:
        os.truncate(self.path(name), size)

    def do_fstat(self, slot: int) -> tuple[int, ...]:
        return _attributes(os.fstat(self.fd(slot)))

    def do_fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self.fd(slot), mode)

    def do_fsync(self, slot: int) -> None:
        os.fsync(self.fd(slot))

    def do_map(self, slot: int, offset: int, data: bytes) -> bytes:
        """Write through a shared mapping where the handle allows it; what is then read back through the handle."""
        fd = self.fd(slot)
        found = os.fstat(fd)
        if found.st_size < offset + len(data) or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o6000:
            raise OSError(errno.EINVAL, "beyond the end, or with set-id bits (docs/conformance.md)")
        with mmap.mmap(fd, 0, mmap.MAP_SHARED) as mapping:
            mapping[offset : offset + len(data)] = data
        return os.pread(fd, 6000, 0)

    def do_chmod(self, name: str, mode: int) -> None:
        os.chmod(self.path(name), mode)

    def do_chown(self, name: str, uid: int, gid: int) -> None:
        os.lchown(self.path(name), uid, gid)

    def do_utime(self, name: str, atime_ns: int, mtime_ns: int) -> tuple[int, int]:
        os.utime(self.path(name), ns=(atime_ns, mtime_ns), follow_symlinks=False)
        found = os.lstat(self.path(name))
        return (found.st_atime_ns, found.st_mtime_ns)

    def do_setxattr(self, name: str, key: str, value: bytes, flags: int) -> None:
        os.setxattr(self.path(name), key, value, flags, follow_symlinks=False)

    def do_getxattr(self, name: str, key: str) -> bytes:
        return os.getxattr(self.path(name), key, follow_symlinks=False)

    def do_listxattr(self, name: str) -> list[str]:
        return sorted(os.listxattr(self.path(name), follow_symlinks=False))

    def do_removexattr(self, name: str, key: str) -> None:
        os.removexattr(self.path(name), key, follow_symlinks=False)

    def do_lstat(self, name: str) -> tuple[int, ...]:
        return _attributes(os.lstat(self.path(name)))

    def do_stat(self, name: str) -> tuple[int, ...]:
        return _attributes(os.stat(self.path(name)))

    def do_readlink(self, name: str) -> str:
        return os.readlink(self.path(name))

    def do_listdir(self, name: str) -> list[str]:
        return sorted(os.listdir(self.path(name)))

    def do_whole(self, name: str) -> bytes:
        if not stat.S_ISREG(os.stat(self.path(name)).st_mode):
            raise OSError(errno.EINVAL, "not a file")
        with open(self.path(name), "rb") as file:
            return file.read()


@contextlib.contextmanager
def _as(uid: int, umask: int) -> Iterator[None]:
    """Effective user and group ``uid``, as the file systems see them."""
    before = os.umask(umask)
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.umask(before)


def _outcome(side: Side, op: Op) -> tuple[str, Any]:
    call: Callable[..., Any] = getattr(side, f"do_{op.what}")
    # Writing as root keeps set-id bits on a plain file system and loses them here (docs/conformance.md).
    uid = 65534 if op.what in ("write", "pwrite") else op.uid
    with _as(uid, op.umask):
        try:
            return ("done", call(*op.args))
        except OSError as error:
            return ("refused", errno.errorcode.get(error.errno or 0, error.errno))
        except ValueError as error:  # mmap of an empty file
            return ("refused", str(error))


def _tree(top: str) -> dict[str, Any]:
    """Everything below a directory: attributes, targets, contents, and which names are one inode."""
    found: dict[str, Any] = {}
    inodes: dict[int, str] = {}
    for directory, names, files in os.walk(top):
        for name in sorted(names + files):
            path = os.path.join(directory, name)
            shown = os.path.relpath(path, top)
            st_ = os.lstat(path)
            content: bytes | str = b""
            if stat.S_ISREG(st_.st_mode):
                with open(path, "rb") as file:
                    content = file.read()
            elif stat.S_ISLNK(st_.st_mode):
                content = os.readlink(path)
            xattrs = {
                key: os.getxattr(path, key, follow_symlinks=False)
                for key in os.listxattr(path, follow_symlinks=False)
            }
            found[shown] = (_attributes(st_), content, xattrs, inodes.setdefault(st_.st_ino, shown))
    return found


@pytest.fixture(scope="module")
def sides(run_dir: Path) -> Iterator[tuple[Path, Overlay]]:
    run_dir.chmod(0o711)  # other users than root must reach both sides
    plain, root = run_dir / "plain", run_dir / "root"
    plain.mkdir()
    root.mkdir()
    with overlay_over(root, run_dir / "differential.sock") as overlay:
        yield plain, overlay


_case = iter(range(1 << 30))


@given(ops=st.lists(OPS, min_size=5, max_size=60))
def test_the_mount_behaves_as_a_plain_directory(sides: tuple[Path, Overlay], ops: list[Op]) -> None:
    """Every operation has the same result or errno on both sides, and both trees are equal afterwards."""
    plain, overlay = sides
    _compare(plain, overlay, ops)


def _compare(
    plain: Path, overlay: Overlay, ops: list[Op], between: Callable[[int], None] = lambda _: None
) -> None:
    case = str(next(_case))
    tops = [plain / case, overlay.root / case]
    for top in tops:
        top.mkdir()
        top.chmod(0o777)
    expected, actual = (Side(top) for top in tops)
    try:
        for step, op in enumerate(ops):
            between(step)
            assert _outcome(actual, op) == _outcome(expected, op), f"step {step}: {op}"
        assert _tree(actual.top) == _tree(expected.top)
    finally:
        expected.close_all()
        actual.close_all()
    after = _tree(expected.top)
    assert _tree(actual.top) == after
    for epoch in overlay.client.status().pending:
        overlay.client.committed(epoch)  # while one is pending, what it needs is kept alive by links of ours
    # Closing has written everything back: the backing directory is complete and ordinary.
    assert _tree(os.fspath(overlay.backing / case)) == after


@given(
    ops=st.lists(OPS, min_size=5, max_size=50),
    cuts=st.lists(st.integers(0, 50), max_size=4),
    commits=st.lists(st.integers(0, 50), max_size=4),
)
def test_cuts_and_pending_epochs_change_nothing_for_the_job(
    sides: tuple[Path, Overlay], ops: list[Op], cuts: list[int], commits: list[int]
) -> None:
    """With epochs cut, pending, committed and given up between the operations, the job sees a plain directory still."""
    plain, overlay = sides
    client = overlay.client

    def between(step: int) -> None:
        if step in cuts:
            client.cut()
        if step in commits and (pending := client.status().pending):
            (client.committed if step % 2 else client.abort)(pending[0])

    _compare(plain, overlay, ops, between)
