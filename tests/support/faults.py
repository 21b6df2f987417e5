"""Faults under a real daemon and a real mount on small disks, with a job that compares.

``FAULTS`` names the faults. Each is a function of a ``Site`` that is well before and after: it causes the
fault, waits until status reports it, takes the cause away, and returns. ``Site.check_recovered`` then proves that ciuic
recovered by itself: a scheduled snapshot is committed, no alert is active, and what it restores equals the
plain files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from support.live import Live
from support.trees import assert_same, manifest
from support.until import until

MIB = 1 << 20
_PATIENCE_SECONDS = 120.0
_EXT4_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_LOG_FLUSH = 2
_FS_IOC_FIEMAP, _FIEMAP_SYNC = 0xC020660B, 1
_CGROUPS = Path("/sys/fs/cgroup")
_LIMIT_BYTES, _ROOM_BYTES = 256 * MIB, 20 * MIB

CONFIG = """
[retention]
keep_last = 50
min_free = "64KiB"
"""


def command(*words: str | Path) -> None:
    """Run a program that must succeed."""
    done = subprocess.run([str(word) for word in words], check=False, timeout=120, capture_output=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, words))}: {done.stderr.decode(errors='replace')}")


class Disk:
    """A small ext4 file system in a file, mounted at ``point``."""

    def __init__(self, image: Path, point: Path, size_bytes: int, *, inodes: int = 4000) -> None:
        self.image, self.point = image, point
        point.mkdir()
        with open(image, "wb") as file:
            file.truncate(size_bytes)
        command("mkfs.ext4", "-q", "-F", "-m", "0", "-N", str(inodes), image)
        self.mount()

    def mount(self) -> None:
        command("mount", "-o", "loop", self.image, self.point)

    def unmount(self) -> None:
        """Unmount; wait for processes that use it just now: a capture, a check by the daemon."""
        until(f"the unmounting of {self.point}", self._try_unmount, _PATIENCE_SECONDS)

    def _try_unmount(self) -> bool:
        return (
            subprocess.run(
                ["umount", str(self.point)], capture_output=True, timeout=60, check=False
            ).returncode
            == 0
        )

    def remount(self, option: str) -> None:
        until(
            f"mount -o remount,{option}",
            lambda: (
                subprocess.run(
                    ["mount", "-o", f"remount,{option}", str(self.point)],
                    capture_output=True,
                    timeout=60,
                    check=False,
                ).returncode
                == 0
            ),
            _PATIENCE_SECONDS,
        )

    def shut_down(self) -> None:
        """Fail every further access with EIO and lose what was not durable, as a lost disk does."""
        fd = os.open(self.point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
        finally:
            os.close(fd)

    @contextmanager
    def filled(self, *, leave_bytes: int = 0) -> Iterator[None]:
        """Fill the disk with one file to ``leave_bytes``, root's reserve too, for the block."""
        filler = self.point / ".filler"
        with open(filler, "wb", buffering=0) as file:
            _fill(file.fileno(), leave_bytes)
        try:
            yield
        finally:
            filler.unlink()


class BreakingDisk(Disk):
    """Disk whose sectors can break and heal: bad_disk.py serves its image."""

    def __init__(self, image: Path, point: Path, size_bytes: int, *, inodes: int = 4000) -> None:
        self._bad, self._served = image.with_suffix(".bad"), image.with_suffix(".served")
        self._size_bytes = size_bytes
        self._server: subprocess.Popen[bytes] | None = None
        self._served.mkdir()
        super().__init__(image, point, size_bytes, inodes=inodes)

    def mount(self) -> None:
        if self._server is None:
            words = ("-m", "support.bad_disk", self.image, self._served, self._bad)
            self._server = subprocess.Popen(
                [sys.executable, *map(str, words)],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                cwd="/",
                stdin=subprocess.DEVNULL,
            )
            until("the disk's server", self._served.joinpath("image").exists, _PATIENCE_SECONDS)
        command("mount", "-o", "loop", self._served / "image", self.point)

    def break_sectors(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Make these sectors answer reads and writes with EIO; all of the disk when none are given."""
        lines = "".join(f"{start} {end}\n" for start, end in tuple(ranges) or ((0, self._size_bytes),))
        temporary = self._bad.with_suffix(".new")
        temporary.write_text(lines)
        temporary.rename(self._bad)

    def mend(self) -> None:
        self._bad.unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop the server once everything mounted on it has been detached."""
        self.mend()
        if self._server is None:
            return
        subprocess.run(["umount", "-l", str(self._served)], capture_output=True, timeout=60, check=False)
        try:
            # The last user of the image releases it.
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def _fill(fd: int, leave_bytes: int) -> None:
    at, piece = 0, 8 * MIB
    # The smallest block of a small ext4.
    while piece >= 1024:
        room = os.fstatvfs(fd).f_bavail * os.fstatvfs(fd).f_frsize - leave_bytes
        if room < piece:
            piece //= 2
            continue
        try:
            os.posix_fallocate(fd, at, piece)
            at += piece
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece //= 2


class Job(threading.Thread):
    """Job that does the same in the protected directory and a plain one, and records differences."""

    def __init__(self, root: Path, twin: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self._places = (root, twin)
        self._rng = random.Random(seed)
        self._over, self._gate = threading.Event(), threading.Lock()
        self.operations = 0
        self.differences: list[str] = []
        self.spared: str = ""
        """An errno for which the mount may give another one that is due as well (conformance.md)."""

    def _spared(self, result: object, plain: object) -> bool:
        return plain == self.spared and isinstance(result, str) and result in errno.errorcode.values()

    def run(self) -> None:
        while not self._over.is_set():
            with self._gate:
                self.do_one()
            # Leaves some of two cores to other processes.
            time.sleep(0.002)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the job between two operations for the block."""
        with self._gate:
            yield

    def stop(self) -> None:
        self._over.set()
        self.join()

    def do_one(self) -> None:
        """Do one random operation on both."""
        rng = self._rng
        kind = rng.choice(_OPERATIONS)
        folder, other_folder = (rng.choice(("", "d", "e", "d/f")) for _ in range(2))
        name, other = f"{folder}/n{rng.randrange(5)}", f"{other_folder}/n{rng.randrange(5)}"
        size, offset = rng.choice((0, 1, 5000, 70_000, 300_000)), rng.choice((0, 3, 4096, 100_000))
        data = rng.randbytes(size)
        results = [
            _result(kind, place, name.strip("/"), other.strip("/"), data, offset) for place in self._places
        ]
        self.operations += 1
        if results[0] != results[1] and not self._spared(*results):
            self.differences.append(
                f"operation {self.operations}, {kind.__name__} {name} {other} {size} at {offset}: "
                f"{results[0]!r:.300} instead of {results[1]!r:.300}"
            )


def _result(kind: Callable[..., Any], place: Path, name: str, other: str, data: bytes, offset: int) -> object:
    try:
        return kind(place / name, place / other, data, offset)
    except OSError as error:
        return error.errno and errno.errorcode[error.errno]


def _replace(path: Path, other: Path, data: bytes, offset: int) -> None:
    temporary = path.with_name(".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _overwrite(path: Path, other: Path, data: bytes, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
        if len(data) == 5000:
            os.fsync(file.fileno())


def _append(path: Path, other: Path, data: bytes, offset: int) -> int:
    with open(path, "ab") as file:
        file.write(data[:7000])
        return file.tell()


def _truncate(path: Path, other: Path, data: bytes, offset: int) -> None:
    os.truncate(path, offset)


def _unlink(path: Path, other: Path, data: bytes, offset: int) -> None:
    path.unlink()


def _rename(path: Path, other: Path, data: bytes, offset: int) -> None:
    path.rename(other)


def _link(path: Path, other: Path, data: bytes, offset: int) -> None:
    other.hardlink_to(path)


def _mkdir(path: Path, other: Path, data: bytes, offset: int) -> None:
    path.parent.mkdir(exist_ok=True)


def _rmdir(path: Path, other: Path, data: bytes, offset: int) -> None:
    path.parent.joinpath("f").rmdir()


def _chmod(path: Path, other: Path, data: bytes, offset: int) -> None:
    path.chmod(0o600 | len(data) % 64)


def _xattr(path: Path, other: Path, data: bytes, offset: int) -> list[str]:
    os.setxattr(path, "user.a", data[:50])
    return os.listxattr(path)


def _read(path: Path, other: Path, data: bytes, offset: int) -> bytes:
    return path.read_bytes()


def _stat(path: Path, other: Path, data: bytes, offset: int) -> tuple[int, ...]:
    facts = path.stat()
    return facts.st_mode, facts.st_nlink, facts.st_size, facts.st_uid


def _list(path: Path, other: Path, data: bytes, offset: int) -> list[str]:
    return sorted(os.listdir(path.parent))


_OPERATIONS = (
    *(_replace, _replace, _overwrite, _overwrite, _append, _truncate, _unlink, _rename, _link),
    *(_mkdir, _mkdir, _rmdir, _chmod, _xattr, _read, _read, _stat, _list),
)


class Site:
    """Site with repository and root on disks of their own, a daemon, and a working job."""

    def __init__(self, top: Path, seed: int, *, interval: str = "2s") -> None:
        self.top, self.rng = top, random.Random(seed)
        self.store = BreakingDisk(top / "store.img", top / "store", 96 * MIB)
        self.disk = BreakingDisk(top / "disk.img", top / "disk", 48 * MIB, inodes=400)
        (top / "run").mkdir(mode=0o700)
        command("mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", top / "run")
        self.root, self.twin = top / "disk/root", top / "twin"
        self.root.mkdir()
        self.twin.mkdir()
        self.live = Live(top, interval=interval, repository=top / "store/repository", more_config=CONFIG)
        self.job = Job(self.root, self.twin, seed)
        self.snapshots_checked = 0

    def __enter__(self) -> Site:
        self.live.run("protect", str(self.root))
        self.live.start(self.root)
        self.job.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.mend()
        self.disk.mend()
        self.job.stop()
        self.live.close()
        self.store.stop()
        self.disk.stop()

    # -- observation

    def status(self) -> dict[str, Any]:
        """Return the daemon's status document; it must always answer."""
        document = self.live.json("status", expect=None)
        assert "roots" in document, f"the daemon does not answer: {document}\n{self.live.log_tail()}"
        return dict(document)

    def alert(self, *keys: str) -> dict[str, Any]:
        """Wait for an alert with one of these keys; it must state its start."""

        def active_alert() -> dict[str, Any] | None:
            return next((one for one in self.status()["alerts"] if one["key"].split(":")[0] in keys), None)

        found = self._await(f"an alert {keys}", active_alert)
        assert found["since"], found
        assert found["message"], found
        return dict(found)

    def worker_pid(self) -> int:
        return int(self.status()["roots"][0]["worker_pid"])

    def captures(self) -> list[int]:
        return [
            pid for pid, words in self.live.processes().items() if "-m ciuic.daemon.capture.process " in words
        ]

    def _await(self, what: str, condition: Callable[[], Any]) -> Any:
        try:
            return until(what, condition, _PATIENCE_SECONDS)
        except TimeoutError as error:
            alerts = self.live.json("status", expect=None).get("alerts")
            raise AssertionError(f"{error}; alerts: {alerts}\n{self.live.log_tail()}") from error

    def check_recovered(self) -> None:
        """Check that the job saw no difference, a scheduled snapshot is exact, and no alert is active."""
        before = self.status()["last_snapshot"]

        def recovered() -> bool:
            status = self.status()
            return status["last_snapshot"] != before and not status["alerts"]

        self._await("a scheduled snapshot and the end of all alerts", recovered)
        with self.job.paused():
            assert not self.job.differences, "\n".join(self.job.differences[:5])
            assert_same(_plain(self.twin), _plain(self.root))
            snapshot = self.live.snapshot()
            out = self.top / "out"
            self.live.run("restore", "-s", snapshot, "-p", str(self.root), "-d", str(out))
            assert_same(manifest(self.root), manifest(out / "root"))
            shutil.rmtree(out)
        self.snapshots_checked += 1


def _plain(top: Path) -> Any:
    """Return names, kinds, modes and contents; times and inode numbers of two trees differ of course."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        facts = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(top))] = (
            facts.st_mode,
            facts.st_nlink if content is not None else 0,
            content,
        )
    return found


# -- the faults


def store_full(site: Site) -> None:
    """Cause ENOSPC in the repository."""
    with site.store.filled():
        site.alert("capture", "schedule")


def store_fails(site: Site) -> None:
    """Cause EIO on the repository's disk, which then comes back without what was not durable."""
    site.store.shut_down()
    site.alert("capture", "schedule")
    site.store.unmount()
    site.store.mount()


def store_unmounted(site: Site) -> None:
    """Unmount the repository's disk under the daemon; nothing is written to the bare mount point."""
    site.store.unmount()
    try:
        site.alert("capture", "schedule")
        assert list(site.store.point.iterdir()) == [], "something was written below the mount point"
    finally:
        site.store.mount()


def store_absent_at_start(site: Site) -> None:
    """Start the daemon while the repository's disk is not mounted.

    Neither the daemon nor ``protect`` makes a repository below the mount point; when the disk is back,
    snapshots continue.
    """
    before = site.live.json("list")
    try:
        # Once unmounted, the directory shows its state directory.
        with site.job.paused():
            site.live.stop()
            site.store.unmount()
            site.live.start(site.root)
        alert = site.alert("store", "schedule")
        assert str(site.store.point) in alert["message"], alert
        site.live.run("protect", str(site.root), expect=3)
        assert list(site.store.point.iterdir()) == [], "something was written below the mount point"
    finally:
        site.store.mount()
    after = {row["id"] for row in site.live.json("list")["snapshots"]}
    assert {row["id"] for row in before["snapshots"]} <= after


def store_read_only(site: Site) -> None:
    """Cause EROFS in the repository."""
    site.store.remount("ro")
    try:
        site.alert("capture", "schedule")
    finally:
        site.store.remount("rw")


def store_sectors_break(site: Site) -> None:
    """Make every sector of the repository's disk answer EIO until its file system fails; then remount it."""
    site.store.break_sectors()
    try:
        site.alert("capture", "schedule")
    finally:
        site.store.mend()
    site.store.unmount()
    site.store.mount()


def runtime_directory_full(site: Site) -> None:
    """Cause ENOSPC in the directory of the journal of pending snapshots."""
    filler, ended = site.top / "run/filler", threading.Event()

    def fill() -> None:
        # Filled repeatedly: a worker that cannot write its session journal removes it, which frees a little space.
        with open(filler, "wb", buffering=0) as file:
            while not ended.wait(0.02):
                with suppress(OSError):
                    while True:
                        file.write(bytes(4096))

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        site.alert("runtime")
    finally:
        ended.set()
        filling.join()
        filler.unlink()


def memory_runs_out(site: Site) -> None:
    """Bring the cgroup of daemon, worker and captures to its limit: only captures are killed."""
    daemon, worker = int(site.status()["pid"]), site.worker_pid()
    parent, limit_name = _memory_controller()
    group = parent / f"ciuic-{os.getpid()}-{site.rng.randrange(1 << 30)}"
    group.mkdir()
    ballast = site.top / "ballast"
    ballast.mkdir(exist_ok=True)
    command("mount", "-t", "tmpfs", "-o", f"size={_LIMIT_BYTES}", "none", ballast)
    try:
        (group / limit_name).write_text(str(_LIMIT_BYTES))
        # Pages of a tmpfs file are charged to the cgroup of the writer, and killing a process does not free
        # them.
        fill = (
            f"echo $$ > {group}/cgroup.procs; head -c {_LIMIT_BYTES - _ROOM_BYTES} /dev/zero > {ballast}/file"
        )
        command("sh", "-c", fill)
        for pid in (daemon, worker):
            (group / "cgroup.procs").write_text(str(pid))
        alert = site.alert("capture")
        assert "SIGKILL" in alert["message"], alert
        assert (int(site.status()["pid"]), site.worker_pid()) == (daemon, worker), "the wrong one was killed"
    finally:
        command("umount", "-l", ballast)
        until("the end of what is in the cgroup", lambda: _remove_group(group), _PATIENCE_SECONDS)


def _memory_controller() -> tuple[Path, str]:
    """Return where cgroups with a memory limit can be made, and the limit's file name: version 1, or 2."""
    if (_CGROUPS / "memory/memory.limit_in_bytes").exists():
        return _CGROUPS / "memory", "memory.limit_in_bytes"
    if "memory" in (_CGROUPS / "cgroup.subtree_control").read_text().split():
        return _CGROUPS, "memory.max"
    raise FileNotFoundError(errno.ENOENT, "no memory controller")


def _remove_group(group: Path) -> bool:
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def _pending(site: Site) -> None:
    """Wait until an epoch is sealed and cannot be captured, so that old content is saved before changes."""
    site._await("a pending epoch", lambda: site.live.json("status", expect=None).get("captures"))


def root_disk_full(site: Site) -> None:
    """Fill the job's own disk while a capture that cannot end keeps what the job removes and overwrites.

    The job gets all the space there would be without ciuic, and ENOSPC no earlier.
    """
    with site.store.filled():
        _pending(site)
        with site.job.paused():
            size = os.statvfs(site.disk.point).f_bavail * os.statvfs(site.disk.point).f_frsize * 6 // 10
            # Each round fits only if the previous one takes no space any more.
            for round_ in range(4):
                path = site.root / "large"
                with open(path, "wb") as file:
                    for _ in range(size // MIB):
                        file.write(bytes([round_ + 1]) * MIB)
                    file.flush()
                    os.fsync(file.fileno())
                assert path.stat().st_size == size // MIB * MIB
                path.unlink()
            room = os.statvfs(site.root).f_bavail * os.statvfs(site.root).f_frsize
            written = _write_until_full(site.root / "more")
            assert written >= room - 2 * MIB, f"{written} bytes could be written where {room} were free"
            (site.root / "more").unlink()
        site.alert("abandoned", "capture")


def _write_and_sync(fd: int, data: bytes) -> None:
    """Write at the descriptor's offset and sync."""
    os.write(fd, data)
    os.fsync(fd)


def _overwrite_and_sync(fd: int, data: bytes) -> None:
    """Write at the beginning and sync."""
    os.pwrite(fd, data, 0)
    os.fsync(fd)


def _write_until_full(path: Path) -> int:
    """Return the bytes that were durable when the disk was full."""
    written = 0
    with open(path, "wb", buffering=0) as file:
        while (failure := _errno_of(partial(_write_and_sync, file.fileno(), bytes([7]) * MIB))) is None:
            written += MIB
    assert failure == errno.ENOSPC, failure
    return written


@contextmanager
def _same_disk_directories(site: Site) -> Iterator[tuple[Path, Path]]:
    """Provide a directory in the root and one beside it on the same disk, with the job at rest."""
    places = site.root / "same", site.disk.point / "same"
    with site.job.paused():
        # The job lists this directory.
        for place in (*places, site.twin / "same"):
            place.mkdir()
    try:
        yield places
    finally:
        with site.job.paused():
            for place in (*places, site.twin / "same"):
                shutil.rmtree(place)


def root_disk_read_only(site: Site) -> None:
    """Make the root's disk read-only: the job gets EROFS as on a plain directory, and reads on."""
    with _same_disk_directories(site) as places:
        other = Job(*places, seed=site.rng.randrange(1 << 30))
        for _ in range(100):
            other.do_one()
        with site.job.paused():
            site.disk.remount("ro")
            # Nothing changes, but a missing name may give ENOENT.
            other.spared = "EROFS"
            try:
                for _ in range(300):
                    other.do_one()
                site.alert("capture", "schedule")
                for _ in range(100):
                    other.do_one()
            finally:
                site.disk.remount("rw")
            other.spared = ""
            for _ in range(100):
                other.do_one()
        assert not other.differences, "\n".join(other.differences[:5])


def root_sectors_break(site: Site) -> None:
    """Make sectors of the root's disk answer EIO: the job gets it as on plain files.

    The snapshot has everything else and names what it lacks; the next one has it again.
    """
    with _same_disk_directories(site) as places:
        files = [place / "file" for place in places]
        data = site.rng.randbytes(300_000)
        with site.job.paused():
            for file in files:
                file.write_bytes(data)
                _uncache(file)
            site.live.snapshot()
            with _without_overlay(site) as disk:
                ranges = [
                    found for file in files for found in _sectors(disk / file.relative_to(site.disk.point))
                ]
                site.disk.break_sectors(ranges)
                try:
                    outcomes = [_use_broken(file, disk / file.relative_to(site.disk.point)) for file in files]
                    assert outcomes[0] == outcomes[1], outcomes
                    assert errno.EIO in outcomes[1], outcomes
                    alert = site.alert("unreadable")
                    assert "same/file" in alert["message"], alert
                finally:
                    site.disk.mend()
                for file in files:
                    _uncache(file)
                    _uncache(disk / file.relative_to(site.disk.point))
            contents = [file.read_bytes() for file in files]
            assert contents[0][4096:] == contents[1][4096:] == data[4096:]


@contextmanager
def _without_overlay(site: Site) -> Iterator[Path]:
    """Mount the root's disk once more, without the overlay over it."""
    point = site.top / "uncovered"
    point.mkdir(exist_ok=True)
    command("mount", "--bind", site.disk.point, point)
    try:
        yield point
    finally:
        # The daemon's scan of processes may have it open.
        command("umount", "-l", point)


def _uncache(path: Path) -> None:
    """Write the file's pages to the disk and drop them, so that the next read goes there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _sectors(path: Path) -> list[tuple[int, int]]:
    """Return the byte ranges of the file's content on its disk (FIEMAP)."""
    request = bytearray(32 + 32 * 56)
    struct.pack_into("QQIIII", request, 0, 0, 1 << 62, _FIEMAP_SYNC, 0, 32, 0)
    with open(path, "rb") as file:
        fcntl.ioctl(file, _FS_IOC_FIEMAP, request)
    (count,) = struct.unpack_from("I", request, 20)
    extents = (struct.unpack_from("QQQ", request, 32 + 56 * number) for number in range(count))
    return [(start, start + length) for _, start, length in extents]


def _use_broken(file: Path, backing: Path) -> list[object]:
    """Return a job's results on a file with broken sectors; none of it is cached before and after."""
    _uncache(file)
    _uncache(backing)
    fd = os.open(file, os.O_RDWR)
    try:
        outcomes: list[object] = [
            _errno_of(lambda: os.pread(fd, 100, 50_000)),
            _errno_of(partial(_overwrite_and_sync, fd, bytes(4096))),
            _errno_of(lambda: os.fsync(fd)),
            os.fstat(fd).st_size,
            _errno_of(file.read_bytes),
        ]
    finally:
        os.close(fd)
    outcomes.append(_errno_of(lambda: file.with_name("other").write_bytes(b"elsewhere")))
    _uncache(file)
    _uncache(backing)
    return outcomes


def root_disk_without_inodes(site: Site) -> None:
    """Let the job use up the inodes of its disk: as many as plain files would; removing files frees them."""
    with site.store.filled():
        _pending(site)
        with site.job.paused():
            free = os.statvfs(site.root).f_ffree
            for _ in range(3):
                made = _make_files(site.root, free + 50)
                # Inodes of the undo log were reported free, and are given back when the job meets the limit.
                assert abs(made - free) <= 8, (made, free)
                for number in range(made):
                    (site.root / f"i{number}").unlink()


def _make_files(root: Path, limit: int) -> int:
    for number in range(limit):
        if (failure := _errno_of((root / f"i{number}").touch)) is not None:
            assert failure == errno.ENOSPC, failure
            return number
    return limit


def _errno_of(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def worker_out_of_descriptors(site: Site) -> None:
    """Use up the worker's descriptors: open files still work, opens fail (conformance.md), it recovers."""
    pid = site.worker_pid()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    path = site.root / "open"
    with site.job.paused(), open(path, "w+b", buffering=0) as file:
        file.write(b"before")
        taken = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(taken, 24), limits[1]))
        try:
            failures = [_errno_of(lambda: (site.root / "n9").read_bytes()) for _ in range(3)]
            for number in range(50):
                file.seek(0)
                file.write(b"%06d" % number * 1000)
                os.fsync(file.fileno())
                file.seek(0)
                assert file.read(6) == b"%06d" % number
            assert set(failures) <= {errno.EMFILE, errno.ENOENT}, failures
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert path.read_bytes() == b"000049" * 1000
    path.unlink()
    assert site.worker_pid() == pid, "the worker did not survive"


FAULTS: dict[str, Callable[[Site], None]] = {
    fault.__name__: fault
    for fault in (
        store_full, store_fails, store_unmounted, store_absent_at_start, store_read_only, store_sectors_break, runtime_directory_full, memory_runs_out,
        root_disk_full, root_disk_without_inodes, root_disk_read_only, root_sectors_break, worker_out_of_descriptors,
    )
}  # fmt: skip


def open_descriptors(pid: int) -> int:
    """Return how many descriptors the process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def unavailable(fault: str) -> str:
    """Return why this machine cannot cause the fault; empty when it can."""
    if fault == "memory_runs_out":
        try:
            _memory_controller()
        except OSError:
            return "there is no memory controller in which cgroups can be made"
    return ""
