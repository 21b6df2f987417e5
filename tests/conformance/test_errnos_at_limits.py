"""Limits of the backing file system and of the process: refusals have the errno of a plain directory.

With the kernel's write cache a full disk may be reported by fsync or close in place of write
(docs/conformance.md); for writes the first errno up to and including close is compared.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.actor import ALICE, BOB, ROOT, Actor
from support.ci import needs
from support.faults import MIB, Disk, command
from support.overlay import DRIVER, Overlay, overlay_over
from support.sides import tree

pytestmark = pytest.mark.mount

PIECE = b"0123456789abcdef" * 4096
Call = Callable[[Path], Any]


def _errno_of(call: Call, top: Path) -> Any:
    """Return the call's result, or the name of its errno."""
    try:
        return call(top)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def _write_all(path: Path, size: int) -> None:
    """Write and sync; raise the first error, that of close included, and remove nothing."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for at in range(0, size, len(PIECE)):
            os.pwrite(fd, PIECE[: size - at], at)
        os.fsync(fd)
    except OSError:
        with suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


@pytest.fixture(scope="module")
def disk(run_dir: Path) -> Iterator[Disk]:
    run_dir.chmod(0o711)
    (run_dir / "limits").mkdir()
    disk = Disk(run_dir / "limits" / "image", run_dir / "limits" / "disk", 48 * MIB, inodes=600)
    yield disk
    disk.unmount()
    disk.image.unlink()


@pytest.fixture
def sides(disk: Disk, run_dir: Path) -> Iterator[tuple[Path, Overlay]]:
    """Provide a plain directory and a mount on one small disk, empty before and after."""
    plain, root = disk.point / "plain", disk.point / "root"
    for top in (plain, root):
        top.mkdir()
        top.chmod(0o777)
    with overlay_over(root, run_dir / "limits.sock") as overlay:
        yield plain, overlay
    for top in (plain, root):
        shutil.rmtree(top)


def _furnish(top: Path) -> None:
    (top / "file").write_bytes(PIECE)
    (top / "folder").mkdir()
    (top / "link").symlink_to("file")
    os.mkfifo(top / "fifo")


_CHANGES: list[tuple[str, Call]] = [
    ("create", lambda top: os.close(os.open(top / "new", os.O_WRONLY | os.O_CREAT, 0o644))),
    ("create-existing", lambda top: os.close(os.open(top / "file", os.O_RDONLY | os.O_CREAT, 0o644))),
    ("open-to-write", lambda top: os.close(os.open(top / "file", os.O_RDWR))),
    ("open-to-truncate", lambda top: os.close(os.open(top / "file", os.O_WRONLY | os.O_TRUNC))),
    ("open-fifo", lambda top: os.close(os.open(top / "fifo", os.O_RDWR | os.O_NONBLOCK))),
    ("mkdir", lambda top: os.mkdir(top / "new-folder")),
    ("mkdir-existing", lambda top: os.mkdir(top / "folder")),
    ("mknod", lambda top: os.mknod(top / "node", stat.S_IFIFO | 0o644)),
    ("symlink", lambda top: os.symlink("s" * 300, top / "long")),
    ("link", lambda top: os.link(top / "file", top / "second")),
    ("rename", lambda top: os.rename(top / "file", top / "moved")),
    ("unlink", lambda top: os.unlink(top / "file")),
    ("unlink-absent", lambda top: os.unlink(top / "absent")),
    ("rmdir", lambda top: os.rmdir(top / "folder")),
    ("truncate", lambda top: os.truncate(top / "file", 5)),
    ("truncate-up", lambda top: os.truncate(top / "file", 10 * MIB)),
    ("chmod", lambda top: os.chmod(top / "file", 0o600)),
    ("chown", lambda top: os.chown(top / "file", 1, 1)),
    ("utime", lambda top: os.utime(top / "file", ns=(5, 5))),
    ("setxattr", lambda top: os.setxattr(top / "file", "user.a", b"v" * 2000)),
    ("removexattr", lambda top: os.removexattr(top / "file", "user.a")),
    ("access", lambda top: os.access(top / "file", os.W_OK)),
    ("read", lambda top: len((top / "file").read_bytes())),
]
_NAMES = [name for name, _ in _CHANGES]
_KNOWN_WHEN_READ_ONLY = [("unlink-absent", "EROFS", "ENOENT"), ("access", False, True)]
"""Calls that only ask the mount, which stays writable itself, do not see EROFS (docs/conformance.md)."""


def _values(results: list[tuple[str, Any]]) -> list[Any]:
    return [value for _, value in results]


def _do_all(top: Path) -> list[tuple[str, Any]]:
    """Make each change by itself, on what the previous ones have left."""
    return [(name, _errno_of(change, top)) for name, change in _CHANGES]


def test_a_read_only_file_system(disk: Disk, sides: tuple[Path, Overlay]) -> None:
    """Every change on a read-only backing file system answers EROFS, or what it answers on plain files."""
    plain, overlay = sides
    for top in (plain, overlay.root):
        _furnish(top)
    disk.remount("ro")
    try:
        expected, found = _do_all(plain), _do_all(overlay.root)
    finally:
        disk.remount("rw")
    assert ("mkdir", "EROFS") in expected
    assert [
        (name, *pair)
        for name, *pair in zip(_NAMES, _values(expected), _values(found), strict=True)
        if pair[0] != pair[1]
    ] == _KNOWN_WHEN_READ_ONLY
    assert _do_all(overlay.root) == _do_all(plain)
    assert tree(os.fspath(overlay.root)) == tree(os.fspath(plain))


def test_changes_on_a_full_disk_answer_as_on_plain_files(disk: Disk, sides: tuple[Path, Overlay]) -> None:
    """Every change on a full disk answers as on plain files, and with space again everything works."""
    plain, overlay = sides
    for top in (plain, overlay.root):
        _furnish(top)
    results = {}
    for top in (plain, overlay.root):
        with disk.filled():
            results[top] = [*_do_all(top), ("write", _errno_of(lambda top: _write_all(top / "w", MIB), top))]
    assert ("write", "ENOSPC") in results[plain]
    assert results[overlay.root] == results[plain]
    for top in (plain, overlay.root):
        _write_all(top / "w", MIB)
        assert (top / "w").stat().st_size == MIB
    assert _do_all(overlay.root) == _do_all(plain)
    assert tree(os.fspath(overlay.root)) == tree(os.fspath(plain))


def test_calls_that_need_an_inode_answer_enospc(disk: Disk, sides: tuple[Path, Overlay]) -> None:
    """Calls that need an inode on a disk without any answer ENOSPC; others work, as on plain files."""
    plain, overlay = sides
    for top in (plain, overlay.root):
        _furnish(top)
    results = []
    for top in (plain, overlay.root):
        filler = disk.point / "filler"
        filler.mkdir()
        with suppress(OSError):
            for number in range(100_000):
                (filler / str(number)).touch()
        results.append(_do_all(top))
        shutil.rmtree(filler)
    assert ("create", "ENOSPC") in results[0]
    assert results[1] == results[0]


@pytest.mark.skipif(DRIVER == "pyfuse3", reason="its sessions end with their worker")
def test_a_session_is_handed_over_on_a_full_disk(disk: Disk, sides: tuple[Path, Overlay]) -> None:
    """A session handed over on a full disk loses only the tracking that could not be written.

    The successor serves the job's open files and tracks changes from its own start.
    """
    _, overlay = sides
    root = overlay.root
    _furnish(root)
    with Actor(ROOT) as job:
        for slot, name in enumerate(("kept", "gone")):
            assert job.do(root, "open", (name, os.O_RDWR | os.O_CREAT, 0o644, slot)) == ("done", None)
            assert job.do(root, "pwrite", (slot, 0, PIECE)) == ("done", len(PIECE))
            assert job.do(root, "fsync", (slot,)) == ("done", None)
        assert job.do(root, "unlink", ("gone",)) == ("done", None)
        overlay.keep_session()
        session = overlay.client.status().session
        with disk.filled():
            overlay.client.hand_over()
            overlay.succeed()
            assert "tracking_not_handed_over" in overlay.log()
            for slot in (0, 1):
                assert job.do(root, "pread", (slot, 2 * len(PIECE), 0)) == ("done", PIECE)
            assert sorted(os.listdir(root)) == ["fifo", "file", "folder", "kept", "link"]
            assert _errno_of(lambda top: _write_all(top / "more", MIB), root) == "ENOSPC"
        for slot in (0, 1):
            assert job.do(root, "pwrite", (slot, len(PIECE), b"more")) == ("done", 4)
            assert job.do(root, "pread", (slot, 2 * len(PIECE), 0)) == ("done", PIECE + b"more")
    assert overlay.client.status().session != session
    _write_all(root / "more", MIB)
    overlay.client.committed(overlay.client.cut().epoch)


def test_file_size_limit_of_a_process(sides: tuple[Path, Overlay]) -> None:
    """Writes under RLIMIT_FSIZE are cut short up to the limit; one beyond it gives EFBIG and SIGXFSZ.

    Other processes are not limited.
    """
    limit = 10_000
    seen = []
    for top in (sides[0], sides[1].root):
        with Actor(ALICE) as limited, Actor(BOB) as other:
            limited.limit_file_size(limit)
            file = ("f", os.O_RDWR | os.O_CREAT, 0o666, 0)
            appended = ("f", os.O_WRONLY | os.O_APPEND, 0, 1)
            calls: list[tuple[Actor, str, tuple[Any, ...]]] = [
                (limited, "open", file),
                (limited, "pwrite", (0, limit - 1000, b"x" * 2000)),
                (limited, "pwrite", (0, limit, b"x")),
                (limited, "pwrite", (0, limit * 10, b"x")),
                (limited, "open", appended),
                (limited, "write", (1, b"x")),
                (limited, "ftruncate", (0, limit)),
                (limited, "ftruncate", (0, limit + 1)),
                (limited, "truncate", ("f", limit + 1)),
                (limited, "direct_write", (0, 2, 1, 65)),
                (other, "open", file),
                (other, "pwrite", (0, limit, b"longer")),
                (limited, "ftruncate", (0, limit - 1)),
                (limited, "fstat", (0,)),
            ]
            results = [actor.do(top, what, arguments, umask=0) for actor, what, arguments in calls]
            seen.append((results, limited.signals(), other.signals()))
    assert seen[1] == seen[0]
    results, signals, _ = seen[0]
    assert ("refused", "EFBIG") in results
    assert signals > 0


def test_a_size_that_the_file_system_cannot_have(sides: tuple[Path, Overlay]) -> None:
    """A truncate(2) beyond the backing file system's largest file size answers EFBIG and changes nothing."""
    for size in (1 << 44, (1 << 63) - 1):
        seen = []
        for top in (sides[0], sides[1].root):
            (top / "f").write_bytes(b"content")
            seen.append(
                (
                    _errno_of(lambda top, size=size: os.truncate(top / "f", size), top),
                    (top / "f").read_bytes(),
                )
            )  # type: ignore[misc]
        assert seen == [("EFBIG", b"content")] * 2


def test_as_many_links_as_the_file_system_allows(sides: tuple[Path, Overlay]) -> None:
    """Links can be made up to the largest link count, then give EMLINK; removing one makes room for one."""
    plain, overlay = sides
    seen = []
    for top, below in ((plain, plain), (overlay.root, overlay.backing)):
        links = below / "links"
        links.mkdir()
        (below / "f").touch()
        # Made beside the mount: one by one through it they would take half a minute.
        for number in range(64_990):
            os.link(below / "f", links / str(number))
        results = [_errno_of(lambda top, n=n: os.link(top / "f", top / f"more-{n}"), top) for n in range(15)]  # type: ignore[misc]
        counts = [(top / "f").stat().st_nlink]
        os.unlink(top / "more-0")
        results.append(_errno_of(lambda top: os.link(top / "f", top / "again"), top))
        counts.append((top / "links" / "5").stat().st_nlink)
        seen.append((results, counts))
        shutil.rmtree(links)
    assert seen[0][0].count("EMLINK") == 6
    assert seen[1] == seen[0]


def test_writes_beyond_a_quota_answer_edquot(run_dir: Path) -> None:
    """Writes beyond the quota of a btrfs qgroup answer EDQUOT on both sides, and below it all works."""
    needs("" if shutil.which("mkfs.btrfs") else "mkfs.btrfs is not installed")
    place = run_dir / "quota"
    (place / "disk").mkdir(parents=True)
    with open(place / "image", "wb") as file:
        file.truncate(160 * MIB)
    command("mkfs.btrfs", "-q", place / "image")
    command("mount", "-o", "loop", place / "image", place / "disk")
    try:
        seen = []
        command("btrfs", "quota", "enable", place / "disk")
        for name in ("plain", "root"):
            top = place / "disk" / name
            command("btrfs", "subvolume", "create", top)
            command("btrfs", "qgroup", "limit", str(8 * MIB), top)
        with overlay_over(place / "disk/root", place / "quota.sock"):
            for top in (place / "disk/plain", place / "disk/root"):
                results = [_errno_of(lambda top: _write_all(top / "small", MIB), top)]
                results.append(_errno_of(lambda top: _write_all(top / "large", 20 * MIB), top))
                os.unlink(top / "large")
                os.sync()
                results.append(_errno_of(lambda top: _write_all(top / "next", MIB), top))
                results.append((top / "next").stat().st_size)
                seen.append(results)
        assert seen[0] == [None, "EDQUOT", None, MIB]
        assert seen[1] == seen[0]
    finally:
        command("umount", place / "disk")
