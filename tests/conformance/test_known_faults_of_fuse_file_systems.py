"""Known faults of other FUSE file systems, each checked on a real mount."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.ci import needs
from support.overlay import PASSES, Overlay, overlay_over
from support.small_disks import missing, small_disk

from ciuic.fuse_layer.system import syscalls

pytestmark = pytest.mark.mount

ORDINARY_USER = 65534


@contextlib.contextmanager
def as_ordinary_user(umask: int = 0o022) -> Iterator[None]:
    """Run file system operations as an ordinary user."""
    before = os.umask(umask)
    os.setegid(ORDINARY_USER)
    os.seteuid(ORDINARY_USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.umask(before)


def test_new_files_belong_to_their_creator(place: Path) -> None:
    """Files of every kind belong to their creator, with its umask, on the mount and behind it."""
    with as_ordinary_user(umask=0o027):
        (place / "file").write_text("x")
        (place / "dir").mkdir()
        (place / "link").symlink_to("file")
        os.mkfifo(place / "fifo")
    for name, mode in (("file", 0o640), ("dir", 0o750), ("link", 0o777), ("fifo", 0o640)):
        found = (place / name).lstat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (
            ORDINARY_USER,
            ORDINARY_USER,
            mode,
        ), name


def test_a_setgid_directory_gives_its_group(place: Path) -> None:
    """Files created in a set-group-id directory get its group, and directories also the bit."""
    os.chown(place, 0, 12345)
    place.chmod(0o2777)
    with as_ordinary_user():
        (place / "file").write_text("x")
        (place / "dir").mkdir()
    assert (place / "file").stat().st_gid == 12345
    assert (place / "dir").stat().st_gid == 12345
    assert (place / "dir").stat().st_mode & stat.S_ISGID


@pytest.mark.skipif(shutil.which("setfacl") is None, reason="setfacl is not installed")
def test_a_default_acl_overrides_the_umask(place: Path, tmp_path: Path) -> None:
    """A default ACL replaces the umask and is inherited by children, as on the backing file system."""
    shown = []
    for directory in (place, tmp_path / "plain"):
        directory.mkdir(exist_ok=True)
        subprocess.run(["setfacl", "-d", "-m", "u:1234:rwx,g::rx,o::-", directory], check=True)
        before = os.umask(0o077)
        try:
            (directory / "file").write_text("x")
            (directory / "dir").mkdir()
        finally:
            os.umask(before)
        shown.append(
            [
                subprocess.run(["getfacl", "-cp", directory / name], check=True, capture_output=True).stdout
                for name in ("file", "dir")
            ]
        )
    assert b"user:1234:rwx" in shown[1][0]
    assert shown[0] == shown[1]


def test_writing_takes_set_id_bits_away_at_once(place: Path) -> None:
    """A write by a non-root owner clears a file's set-user-id bit at once, also in the kernel's cache."""
    path = place / "program"
    path.write_text("old")
    os.chown(path, ORDINARY_USER, ORDINARY_USER)
    path.chmod(0o6755)
    assert path.stat().st_mode & 0o7777 == 0o6755
    with as_ordinary_user(), open(path, "r+b", buffering=0) as file:
        file.write(b"new")
    assert path.stat().st_mode & 0o7777 == 0o755


def test_listings_have_both_dots_and_every_name_once(place: Path) -> None:
    """A listing of a large directory has ., .. and each name once while other names come and go."""
    names = {f"file-{i:05}" for i in range(3000)}
    for name in names:
        (place / name).touch()
    listing = subprocess.Popen(["ls", "-aU", place], stdout=subprocess.PIPE, text=True)
    for i in range(500):
        (place / f"extra-{i}").touch()
        (place / f"extra-{i}").unlink()
    out = [line for line in (listing.communicate()[0]).splitlines() if not line.startswith("extra")]
    assert sorted(out) == sorted(names | {".", ".."})


def test_a_listing_goes_on_where_it_was_while_its_files_are_removed(place: Path) -> None:
    """Removing files while listing their directory, as rm -r does, skips no file."""
    for i in range(2500):
        (place / f"{i}").touch()
    seen = 0
    with os.scandir(place) as entries:
        for entry in entries:
            os.unlink(entry.path)
            seen += 1
    assert seen == 2500
    assert os.listdir(place) == []


def test_cached_appends_are_neither_lost_nor_doubled(place: Path, overlay: Overlay) -> None:
    """Records appended through two handles, with page caches dropped, are neither lost, doubled nor moved."""
    path = place / "log"
    expected = b""
    with open(path, "ab", buffering=0) as one, open(path, "ab", buffering=0) as two:
        for i in range(300):
            record = b"%05d %s\n" % (i, b"x" * (i % 97))
            (one if i % 3 else two).write(record)
            expected += record
            if i % 50 == 0:
                os.fsync(one.fileno())
                os.posix_fadvise(one.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert path.read_bytes() == expected
    assert (overlay.backing / place.name / "log").read_bytes() == expected


def test_many_files_may_be_known_and_few_descriptors_open(place: Path, overlay: Overlay) -> None:
    """Thousands of known files cost the worker no descriptor each."""
    for i in range(2000):
        (place / f"{i}").write_bytes(b"")
    assert len(os.listdir(f"/proc/{overlay.process.pid}/fd")) < 1500
    for i in range(2000):
        os.stat(place / f"{i}")


def test_a_removed_file_lives_on_through_its_handle(place: Path) -> None:
    """An open file can be read, written, truncated, mapped and changed in mode after its removal."""
    path = place / "gone"
    with open(path, "w+b", buffering=0) as file:
        file.write(b"a" * 10000)
        path.unlink()
        assert os.fstat(file.fileno()).st_nlink == 0
        os.fchmod(file.fileno(), 0o600)
        os.ftruncate(file.fileno(), 5000)
        with mmap.mmap(file.fileno(), 0) as mapping:
            mapping[:3] = b"bbb"
        assert os.pread(file.fileno(), 6000, 0) == b"bbb" + b"a" * 4997
        assert not path.exists()
        path.write_text("another")
        assert os.fstat(file.fileno()).st_size == 5000


def test_directories_are_followed_when_they_move(place: Path) -> None:
    """A renamed directory's handles, working directories and children are found at once in the new place."""
    (place / "a" / "b" / "c").mkdir(parents=True)
    (place / "a" / "b" / "c" / "file").write_text("1")
    inside = os.open(place / "a" / "b", os.O_RDONLY | os.O_DIRECTORY)
    try:
        (place / "a").rename(place / "z")
        assert (place / "z" / "b" / "c" / "file").read_text() == "1"
        with open(os.open("c/file", os.O_WRONLY | os.O_APPEND, dir_fd=inside), "w") as file:
            file.write("2")
        assert (place / "z" / "b" / "c" / "file").read_text() == "12"
        assert os.stat("..", dir_fd=inside).st_ino == (place / "z").stat().st_ino
    finally:
        os.close(inside)


def test_paths_longer_than_path_max(place: Path) -> None:
    """A tree deeper than 4,096 bytes of path can be made, written, listed and removed."""
    fds = [os.open(place, os.O_RDONLY | os.O_DIRECTORY)]
    name = "d" * 200
    for _ in range(40):
        os.mkdir(name, dir_fd=fds[-1])
        fds.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fds[-1]))
    with open(os.open("deep", os.O_WRONLY | os.O_CREAT, dir_fd=fds[-1]), "w") as file:
        file.write("found")
    assert os.listdir(fds[-1]) == ["deep"]
    os.unlink("deep", dir_fd=fds[-1])
    while len(fds) > 1:
        os.close(fds.pop())
        os.rmdir(name, dir_fd=fds[-1])
    os.close(fds.pop())


def test_a_working_directory_below_path_max(place: Path) -> None:
    """Relative names, getcwd and .. work in a working directory deeper than PATH_MAX."""
    program = """
import os, sys
os.chdir(sys.argv[1])
for _ in range(30):
    os.mkdir("d" * 255), os.chdir("d" * 255)
open("file", "w").write("found")
assert len(os.getcwd()) > 30 * 255 and open("./file").read() == "found"
os.rename("file", "../file"), os.chdir(".."), os.unlink("file")
for _ in range(29):
    os.rmdir("d" * 255), os.chdir("..")
os.rmdir("d" * 255)
"""
    subprocess.run([sys.executable, "-c", program, place], check=True, timeout=60)
    assert os.listdir(place) == []


def test_holes_take_no_blocks(place: Path, overlay: Overlay) -> None:
    """A byte a terabyte away takes one block, the hole reads as zeros, and truncation works both ways."""
    path = place / "sparse"
    with open(path, "w+b", buffering=0) as file:
        file.write(b"start")
        os.pwrite(file.fileno(), b"end", 1 << 40)
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_size == (1 << 40) + 3
        assert os.pread(file.fileno(), 10, (1 << 40) - 5) == bytes(5) + b"end"
        assert os.pread(file.fileno(), 10, 1 << 39) == bytes(10)
        os.ftruncate(file.fileno(), 3)
        os.ftruncate(file.fileno(), 8)
        assert os.pread(file.fileno(), 10, 0) == b"sta" + bytes(5)
        os.pwrite(file.fileno(), b"x", 100 << 20)
    assert path.stat().st_blocks * 512 < 1 << 20
    assert (overlay.backing / place.name / "sparse").stat().st_blocks * 512 < 1 << 20


def test_as_large_as_a_file_can_be(place: Path, tmp_path: Path, overlay: Overlay) -> None:
    """Truncation and a write far out cost the worker no memory, whatever size the file reports.

    Also while an epoch is pending.
    """
    for shift in range(62, 30, -1):
        with contextlib.suppress(OSError), open(tmp_path / "plain", "wb") as file:
            file.truncate(1 << shift)
            break
    path = place / "large"
    path.write_bytes(b"start")
    for _ in range(2):
        os.truncate(path, 1 << shift)
        cut = overlay.client.cut()
        with open(path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"end", (1 << shift) - 3)
            os.fsync(file.fileno())
        os.truncate(path, 7)
        assert path.read_bytes() == b"start\0\0"
        overlay.client.committed(cut.epoch)
    memory = Path(f"/proc/{overlay.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
    # In KiB. One bit for each block of 16 TiB would take 512 MiB.
    assert int(memory) < 400_000


def test_a_file_that_is_open_is_replaced(place: Path) -> None:
    """Handles keep the old file after a rename over it, and the name has the new one.

    The link count and inode number follow.
    """
    (place / "one").write_text("old")
    (place / "two").write_text("new")
    with open(place / "one", "r+b", buffering=0) as old:
        number = (place / "two").stat().st_ino
        (place / "two").rename(place / "one")
        old.write(b"OLD and longer")
        assert (os.fstat(old.fileno()).st_nlink, os.fstat(old.fileno()).st_size) == (0, 14)
        os.ftruncate(old.fileno(), 5)
        assert os.pread(old.fileno(), 20, 0) == b"OLD a"
        assert ((place / "one").stat().st_ino, (place / "one").stat().st_nlink) == (number, 1)
        assert (place / "one").read_text() == "new"


def test_access_times_behave_as_on_a_plain_directory(place: Path, tmp_path: Path) -> None:
    """Access and modification times behave as on a plain directory.

    Times that are set, omitted or set to now; a first uncached read (relatime); O_NOATIME leaves the access
    time alone.
    """
    seen = []
    for folder in (place, tmp_path):
        path = folder / "file"
        path.write_bytes(b"x" * 100_000)
        os.utime(path, ns=(1_000_000_001, 2_000_000_002))
        steps = [(path.stat().st_atime_ns, path.stat().st_mtime_ns)]
        for flags in (os.O_NOATIME, 0):
            fd = os.open(path, os.O_RDONLY | flags)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.read(fd, 10)
            os.close(fd)
            steps.append((path.stat().st_atime_ns > 2_000_000_002, path.stat().st_mtime_ns))
        syscalls.utimensat(os.fsencode(path), None, 7)
        steps.append((path.stat().st_atime_ns > 2_000_000_002, path.stat().st_mtime_ns))
        syscalls.utimensat(os.fsencode(path), 5, None, mtime_now=True)
        steps.append((path.stat().st_atime_ns, path.stat().st_mtime_ns > 10**18))
        seen.append(steps)
    assert seen[1][1:3] == [(False, 2_000_000_002), (True, 2_000_000_002)]
    assert seen[0] == seen[1]


def test_special_files_work(place: Path) -> None:
    """A fifo carries data, a socket accepts connections, and a device node reaches its driver."""
    os.mkfifo(place / "fifo")
    writer = threading.Thread(target=lambda: (place / "fifo").write_text("through"))
    writer.start()
    assert (place / "fifo").read_text() == "through"
    writer.join()
    os.mknod(place / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with open(place / "null", "wb", buffering=0) as null:
        assert null.write(b"swallowed") == 9
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        # Unix socket paths end at 107 bytes.
        fd = os.open(place, os.O_PATH)
        server.bind(f"/proc/self/fd/{fd}/sock")
        server.listen()
        client.connect(f"/proc/self/fd/{fd}/sock")
        os.close(fd)


def test_direct_io_agrees_with_cached_io(place: Path) -> None:
    """O_DIRECT writes and reads of whole pages agree with cached ones."""
    path = place / "direct"
    buffer = mmap.mmap(-1, 8192)
    buffer.write(b"d" * 8192)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        assert os.write(fd, buffer) == 8192
        with open(path, "r+b", buffering=0) as cached:
            cached.seek(4096)
            cached.write(b"c" * 100)
        assert os.preadv(fd, [buffer], 0) == 8192
        assert buffer[4090:4200] == b"d" * 6 + b"c" * 100 + b"d" * 4
    finally:
        os.close(fd)


def test_a_file_that_is_written_has_blocks(place: Path) -> None:
    """A file that is being written reports blocks, so that archivers do not take it for a hole.

    Closed, it reports its own number.
    """
    path = place / "growing"
    with open(path, "wb", buffering=0) as file:
        file.write(b"x" * 1_000_000)
        assert path.stat().st_blocks > 0
    assert path.stat().st_blocks * 512 >= 1_000_000


def test_link_counts_are_the_jobs_own(place: Path, overlay: Overlay) -> None:
    """Link counts leave out the links that keep removed files for epochs, and the state directory."""
    (place / "file").write_text("1")
    os.link(place / "file", place / "second")
    overlay.client.cut()
    (place / "file").unlink()
    assert (place / "second").stat().st_nlink == 1
    assert overlay.root.stat().st_nlink == 2 + sum(entry.is_dir() for entry in os.scandir(overlay.root))
    for epoch in overlay.client.status().pending:
        overlay.client.committed(epoch)
    assert (place / "second").stat().st_nlink == 1


def test_everything_that_a_returned_write_wrote_is_in_the_cut(place: Path, overlay: Overlay) -> None:
    """A cut finds on the backing side every byte written before it to files that ``writers`` names."""
    with open(place / "open", "wb", buffering=0) as file:
        file.write(b"w" * 300_000)
        for name in overlay.client.writers():
            os.close(os.open(os.fsencode(overlay.root) + b"/" + name, os.O_RDONLY))
        cut = overlay.client.cut()
        assert (overlay.backing / place.name / "open").read_bytes() == b"w" * 300_000
        overlay.client.committed(cut.epoch)


@pytest.mark.parametrize("size_bytes", [3, 20 << 20], ids=["small", "swapped"])
@pytest.mark.parametrize("pending", [False, True], ids=["alone", "pending"])
def test_read_only_open_that_truncates(
    place: Path, overlay: Overlay, size_bytes: int, pending: bool, request: pytest.FixtureRequest
) -> None:
    """An open with O_RDONLY | O_TRUNC empties the file, as on Linux; without permission it is refused."""
    path = place / request.node.callspec.id
    path.write_bytes(b"x" * size_bytes)
    path.chmod(0o644)
    if pending:
        overlay.client.cut()
    with as_ordinary_user(), pytest.raises(PermissionError):
        os.open(path, os.O_RDONLY | os.O_TRUNC)
    assert path.stat().st_size == size_bytes
    fd = os.open(path, os.O_RDONLY | os.O_TRUNC)
    try:
        assert os.fstat(fd).st_size == 0
        path.write_bytes(b"new")
        assert os.pread(fd, 9, 0) == b"new"
    finally:
        os.close(fd)
        for epoch in overlay.client.status().pending:
            overlay.client.committed(epoch)
    assert (overlay.backing / place.name / path.name).read_bytes() == b"new"


def test_trusted_attributes_are_invisible_to_users(place: Path) -> None:
    """Names and values of trusted attributes are visible only with CAP_SYS_ADMIN, as on any file system."""
    path = place / "file"
    path.touch()
    os.setxattr(path, "trusted.ciuic", b"1")
    os.setxattr(path, "user.ciuic", b"2")
    assert sorted(os.listxattr(path)) == ["trusted.ciuic", "user.ciuic"]
    with as_ordinary_user():
        assert os.listxattr(path) == ["user.ciuic"]


@pytest.mark.parametrize("kind", ["xfs", "btrfs", "ext4"])
def test_the_present_size_moves_times_by_descriptor_as_on_a_plain_directory(
    tmp_path: Path, kind: str
) -> None:
    """O_TRUNC of an empty file and ftruncate(2) to the present size move mtime: make rebuilds for ever otherwise."""
    needs(missing(kind))
    with small_disk(tmp_path, kind) as disk:
        plain, root = disk / "plain", disk / "root"
        plain.mkdir()
        root.mkdir()
        with overlay_over(root, tmp_path / "control.sock"):
            assert _size_changes(root) == _size_changes(plain)


def _size_changes(top: Path) -> dict[str, bool]:
    """Return for each way of setting the present size whether it moves the modification time."""

    def open_and_close(path: Path, flags: int) -> None:
        os.close(os.open(path, flags, 0o644))

    def ftruncate(path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size)

    (top / "empty").touch()
    (top / "full").write_text("xyz")
    ways: dict[str, tuple[str, Callable[[Path], None]]] = {
        "O_TRUNC": ("empty", lambda path: open_and_close(path, os.O_WRONLY | os.O_TRUNC)),
        "O_TRUNC, O_CREAT, O_RDWR": (
            "empty",
            lambda path: open_and_close(path, os.O_RDWR | os.O_TRUNC | os.O_CREAT),
        ),
        "ftruncate, empty": ("empty", ftruncate),
        "ftruncate": ("full", ftruncate),
    }
    if PASSES:
        # The kernel's write cache shows its own time, which it leaves (docs/conformance.md).
        ways["truncate, empty"] = ("empty", lambda path: os.truncate(path, 0))
        ways["truncate"] = ("full", lambda path: os.truncate(path, 3))
    moved = {}
    for way, (name, change) in ways.items():
        os.utime(top / name, (1, 1))
        change(top / name)
        moved[way] = (top / name).stat().st_mtime != 1
    return moved


def test_an_append_only_file_is_appended_to_and_not_changed_otherwise(tmp_path: Path) -> None:
    """Appends to a file with chattr +a land at its end, all else is refused as on a plain directory."""
    needs(missing("ext4"))
    with small_disk(tmp_path, "ext4") as disk:
        plain, root = disk / "plain", disk / "root"
        for top in (plain, root):
            top.mkdir()
            (top / "log").write_bytes(b"one\n")
        subprocess.run(["chattr", "+a", plain / "log", root / "log"], check=True, timeout=30)
        try:
            with overlay_over(root, tmp_path / "control.sock") as overlay:
                # A pending epoch, of which a later append must change nothing.
                overlay.client.hold(5.0)
                overlay.client.cut()
                overlay.client.release()
                assert _appended(root) == _appended(plain)
            assert (root / "log").read_bytes() == (plain / "log").read_bytes()
        finally:
            subprocess.run(["chattr", "-a", plain / "log", root / "log"], check=True, timeout=30)


def _appended(top: Path) -> tuple[list[type[OSError] | None], bytes]:
    path = top / "log"
    with path.open("ab", buffering=0) as first, path.open("ab", buffering=0) as second:
        # More than one request of the kernel's, and parts of a page.
        for data in (b"a" * 3_000_000, b"b" * 777):
            first.write(data)
            second.write(data)
    with path.open("a+b", buffering=0) as third:
        third.write(b"c")
        third.seek(0)
        seen = third.read()
    refused: list[type[OSError] | None] = []
    for change in (
        lambda: os.close(os.open(path, os.O_WRONLY)),
        lambda: os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_TRUNC)),
        lambda: os.truncate(path, 1),
        path.unlink,
        lambda: path.rename(top / "moved"),
    ):
        try:
            change()
        except OSError as error:
            refused.append(type(error))
        else:
            refused.append(None)
    return refused, seen


def test_a_mapping_changes_nothing_of_an_append_only_file(tmp_path: Path) -> None:
    """An append-only file cannot be mapped for writing, beside a reader either."""
    needs(missing("ext4"))
    with small_disk(tmp_path, "ext4") as disk:
        root = disk / "root"
        root.mkdir()
        (root / "log").write_bytes(b"one\n")
        subprocess.run(["chattr", "+a", root / "log"], check=True, timeout=30)
        try:
            with overlay_over(root, tmp_path / "control.sock"):
                assert not _stored_by_mapping(root / "log")
                with (root / "log").open("rb") as reader:
                    reader.read()
                    assert not _stored_by_mapping(root / "log")
            assert (root / "log").read_bytes() == b"one\n"
        finally:
            subprocess.run(["chattr", "-a", root / "log"], check=True, timeout=30)


def _stored_by_mapping(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("a+b") as file, mmap.mmap(file.fileno(), 4) as mapped:
        mapped[:3] = b"BAD"
        mapped.flush()
        return True
    return False
