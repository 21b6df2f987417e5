"""The snapshots of a root at `.snapshots` in it: what programs see there, and that none sees it elsewhere."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.live import Live, emptied_root
from support.second_user import User, run_as
from support.until import until

from ciuic.fuse_layer.system import mounts
from ciuic.system.privileges import Capability, permitted

pytestmark = pytest.mark.mount
_OTHER_USER = User(4321, 4321)
_READ = "import sys; print(open(sys.argv[1]).read(), end='')"
_LIST = "import os, sys; os.listdir(sys.argv[1])"
_VIEW_MODULE = "ciuic.daemon.roots.view_process"


class Place:
    """A protected root whose snapshots are shown in it."""

    def __init__(self, live: Live, root: Path) -> None:
        self.live = live
        self.root = root
        self.snapshots = root / ".snapshots"
        live.config.write_text(
            f'{live.config.read_text()}\n[[root]]\npath = "{root}"\nsnapshots_dir = true\n'
        )

    def start(self) -> None:
        """Start the daemon, and wait until the view is mounted."""
        self.live.start(self.root)
        self.wait_mounted()

    def is_mounted(self) -> bool:
        """Return whether a view is mounted, whatever answers there."""
        entry = mounts.mount_at(str(self.snapshots))
        return entry is not None and entry.fs_type == mounts.SNAPSHOTS_FS_TYPE

    def answers(self) -> bool:
        """Return whether the view is mounted and served."""
        with suppress(OSError):
            return "latest" in os.listdir(self.snapshots)
        return False

    def wait_mounted(self) -> None:
        """Return when the view answers."""
        until("the view", self.answers)

    def snapshot(self) -> Path:
        """Take a snapshot; return its directory in the view."""
        id_ = self.live.snapshot()
        (name,) = [name for name in os.listdir(self.snapshots) if name.endswith(f"_{id_}")]
        return self.snapshots / name

    def view_pids(self) -> list[int]:
        """Return the processes that serve views."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    here = os.readlink(entry / "cwd")
                except OSError:
                    continue
                # It leaves the directory that it was started in before it mounts.
                if _VIEW_MODULE.encode() in command and here == "/" and self._is_ours(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def _is_ours(self, pid: int) -> bool:
        assert self.live.daemon is not None
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return int(fields[1]) == self.live.daemon.pid


@pytest.fixture
def place(live: Live, root: Path) -> Place:
    return Place(live, root)


@pytest.fixture(scope="module")
def running(run_dir: Path) -> Iterator[Place]:
    """Provide a place with a running daemon, for tests that leave its mounts alone."""
    with Live(Path(tempfile.mkdtemp(dir=run_dir))) as live:
        place = Place(live, live.top / "root")
        place.root.mkdir()
        # Other users come as far as the root.
        for directory in (run_dir, live.top, place.root):
            directory.chmod(0o755)
        place.start()
        yield place


@pytest.fixture
def shared_place(running: Place) -> Place:
    """Provide that place with an empty root."""
    emptied_root(running.live).chmod(0o755)
    return running


def _out(*words: str | Path, expect: int = 0) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd="/")
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def _fill(root: Path) -> None:
    (root / "dir").mkdir()
    (root / "file").write_text("content\n")
    os.link(root / "file", root / "dir/other name")
    os.symlink("../file", root / "dir/link")
    os.setxattr(root / "file", "user.note", b"kept")
    os.mkfifo(root / "pipe", 0o640)
    os.chown(root / "dir", 12, 34)
    with open(root / "holes", "wb") as file:
        file.seek(8 << 20)
        file.write(b"end")
    subprocess.run(["setfacl", "-m", "u:4321:r", root / "file"], check=True)


def test_it_equals_a_restore(shared_place: Place, short_tmp: Path) -> None:
    """diff, rsync with all attributes and tar find nothing between a snapshot in the view and its restore."""
    _fill(shared_place.root)
    shown = shared_place.snapshot()
    (shared_place.root / "file").write_text("changed")
    target = short_tmp / "restored"
    id_ = shown.name.rpartition("_")[2]
    shared_place.live.run("restore", "-s", id_, "-p", str(shared_place.root), "-d", str(target))
    restored = target / shared_place.root.name
    # diff(1) takes two pipes for different.
    _out("diff", "-r", "--no-dereference", "-x", "pipe", shown, restored)
    assert _out("rsync", "-naiAXHS", "--delete", f"{shown}/", f"{restored}/") == ""
    assert (shown / "file").read_text() == "content\n"
    assert os.getxattr(shown / "file", "user.note") == b"kept"
    assert (shown / "file").stat().st_ino == (shown / "dir/other name").stat().st_ino
    assert (shown / "holes").stat().st_blocks * 512 < 1 << 20
    for tree in (shown, restored):
        _out("tar", "-C", tree, "--sort=name", "--xattrs", "--acls", "-cSf", short_tmp / "tar", ".")
        os.rename(short_tmp / "tar", short_tmp / f"{'shown' if tree == shown else 'restored'}.tar")
    _out("tar", "-df", short_tmp / "shown.tar", "-C", restored)
    _out("tar", "-df", short_tmp / "restored.tar", "-C", shown)


def test_a_new_snapshot_appears(shared_place: Place) -> None:
    """A snapshot is there as soon as it is committed, without another mount; names sort by time; latest is the newest."""
    first = mounts.mount_at(str(shared_place.snapshots))
    (shared_place.root / "file").write_text("1")
    one = shared_place.snapshot()
    (shared_place.root / "file").write_text("2")
    two = shared_place.snapshot()
    assert ((one / "file").read_text(), (two / "file").read_text()) == ("1", "2")
    names = sorted(name for name in os.listdir(shared_place.snapshots) if name != "latest")
    assert names[-2:] == [one.name, two.name]
    assert len(one.name.partition("_")[0]) == len("2026-11-22T10-17-16.528")
    until("latest", lambda: os.readlink(shared_place.snapshots / "latest") == two.name)
    assert mounts.mount_at(str(shared_place.snapshots)) == first


def test_nothing_of_it_can_be_changed(shared_place: Place) -> None:
    """Root itself gets EROFS for every change."""
    (shared_place.root / "file").write_text("1")
    shown = shared_place.snapshot()
    changes: list[Callable[[], object]] = [
        lambda: (shown / "file").write_text("2"),
        lambda: (shown / "file").unlink(),
        lambda: (shown / "new").mkdir(),
        lambda: (shared_place.snapshots / "new").mkdir(),
        lambda: shown.rename(shared_place.snapshots / "x"),
        lambda: (shown / "file").chmod(0o600),
    ]
    for change in changes:
        with pytest.raises(OSError, match="Read-only file system"):
            change()


def test_programs_that_walk_never_see_it(shared_place: Place, short_tmp: Path) -> None:
    """Listings, find, du, cp, git, rsync, a snapshot, a difference and a restore see nothing; rm -r removes the rest."""
    root = shared_place.root
    _fill(root)
    id_ = shared_place.snapshot().name.rpartition("_")[2]
    assert ".snapshots" not in os.listdir(root)
    assert ".snapshots" not in _out("find", root)
    _out("cp", "-a", root, short_tmp / "copy")
    assert not (short_tmp / "copy/.snapshots").exists()
    assert ".snapshots" not in _out("rsync", "-naiAXHS", f"{root}/", f"{short_tmp}/nothing/")
    assert ".snapshots" not in _out("du", "-a", root)
    _out("git", "-c", "init.defaultBranch=main", "init", "-q", root)
    assert ".snapshots" not in _out("git", "-C", root, "status", "--porcelain", "--ignored", "-uall")
    assert ".snapshots" not in shared_place.live.run("show", id_, str(root)).stdout.decode()
    assert shared_place.live.run("diff", id_).stdout.decode() != ""
    assert ".snapshots" not in shared_place.live.run("diff", id_).stdout.decode()
    shared_place.live.run("restore", "-s", id_, "-p", str(root), "--overwrite", "--delete")
    assert shared_place.answers()
    assert not (root / ".git").exists()
    shared_place.live.run("undo")
    assert shared_place.answers()
    assert (root / ".git").exists()
    _out("rm", "-r", *(root / name for name in os.listdir(root)))
    _out("find", root, "-mindepth", "1", "-delete")
    assert os.listdir(root) == []
    assert shared_place.answers()


def test_a_program_that_makes_the_name_gets_it(place: Place) -> None:
    """A directory, file or link of the owner's takes the name at once, is kept as all else is, and the view stays away until it is gone."""
    root, name = place.root, place.snapshots
    place.start()
    for make in (
        name.mkdir,
        lambda: os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
        lambda: (root / "mine").rename(name),
        lambda: name.symlink_to("mine"),
    ):
        (root / "mine").mkdir(exist_ok=True)
        make()
        assert not place.is_mounted()
        assert ".snapshots" in os.listdir(root)
        if name.is_dir():
            (name / "file").write_text("mine")
        id_ = place.live.snapshot()
        assert ".snapshots" in place.live.run("show", id_, str(root)).stdout.decode()
        until("the end of the process", lambda: not place.view_pids())
        assert not place.is_mounted()
        _out("rm", "-r", name)
        place.wait_mounted()


def test_one_that_was_there_stays(place: Place) -> None:
    """A directory of that name that the owner has already is served as any other."""
    place.snapshots.mkdir()
    (place.snapshots / "file").write_text("mine")
    place.live.start(place.root)
    place.live.snapshot()
    assert (place.snapshots / "file").read_text() == "mine"
    assert not place.is_mounted()
    line = f"{place.root}: no snapshots at .snapshots in it: name taken"
    until("the word of it", lambda: line in place.live.run("status").stdout.decode())


def test_it_comes_and_goes_with_the_setting_and_the_root(place: Place) -> None:
    """A reload, and `umount -l` of a root, take the view away and bring it back; a stop leaves nothing.

    Switched off, the name is free as in a plain directory. The stop leaves no mount, process and name also while a program has a file open.
    """
    (place.root / "file").write_text("1")
    place.start()
    text = place.live.config.read_text()
    place.live.config.write_text(text.replace("snapshots_dir = true", "snapshots_dir = false"))
    place.live.run("reload")
    until("the end of the view", lambda: not place.is_mounted())
    until("the end of the name", lambda: not os.path.lexists(place.snapshots))
    assert place.view_pids() == []
    place.live.config.write_text(text)
    place.live.run("reload")
    place.wait_mounted()
    subprocess.run(["umount", "-l", place.root], check=True, timeout=30)
    until("the overlay", lambda: mounts.overlay_at(str(place.root)) is not None)
    place.wait_mounted()
    assert [m.fs_type for m in map(mounts.mount_at, [str(place.snapshots)]) if m] == [
        mounts.SNAPSHOTS_FS_TYPE
    ]
    fd = os.open(place.snapshot() / "file", os.O_RDONLY)
    try:
        assert place.live.stop() == 0
        assert not place.is_mounted()
        assert mounts.overlay_at(str(place.root)) is None
    finally:
        # Nobody serves it any more.
        with suppress(OSError):
            os.close(fd)
    assert os.listdir(place.root) == ["file"]
    until("the end of the processes", lambda: not place.live.processes())


def test_it_survives_the_worker_and_the_daemon(place: Place) -> None:
    """A killed worker, a killed daemon and a reload leave the view where it is, and reads of it go on."""
    (place.root / "file").write_text("1")
    place.start()
    shown = place.snapshot()
    before = mounts.mount_at(str(place.snapshots))
    status = place.live.status()
    assert status is not None
    os.kill(status["roots"][0]["worker_pid"], signal.SIGKILL)
    until("a successor", lambda: (place.root / "file").read_text() == "1")
    assert (shown / "file").read_text() == "1"
    place.live.run("reload")
    assert mounts.mount_at(str(place.snapshots)) == before
    place.live.stop(signal.SIGKILL)
    assert (shown / "file").read_text() == "1"
    place.live.start(place.root)
    place.wait_mounted()
    until("the view", lambda: place.answers() and (shown / "file").read_text() == "1")


def test_a_killed_view_is_no_error_of_the_job(place: Place) -> None:
    """The process is killed a dozen times while a job works in the root: no error there, and the view comes back."""
    (place.root / "file").write_text("1")
    place.start()
    name = place.snapshot().name
    errors: list[OSError] = []
    done = threading.Event()

    def job() -> None:
        number = 0
        # Paced: the view has the least priority, and would wait for this loop.
        while not done.wait(0.005):
            number += 1
            try:
                path = place.root / f"f{number % 7}"
                path.write_text(str(number))
                assert path.read_text() == str(number)
                os.listdir(place.root)
                (place.root / "d").mkdir()
                path.rename(place.root / "d/moved")
                (place.root / "d/moved").unlink()
                (place.root / "d").rmdir()
            except OSError as error:
                errors.append(error)
                return

    thread = threading.Thread(target=job)
    thread.start()
    try:
        for _ in range(12):
            (pid,) = place.view_pids()
            os.kill(pid, signal.SIGKILL)
            until("another process", lambda gone=pid: place.answers() and gone not in place.view_pids())
            assert (place.snapshots / name / "file").read_text() == "1"
    finally:
        done.set()
        thread.join()
    assert errors == []


def test_without_the_mount_it_is_empty(shared_place: Place) -> None:
    """Where another mount namespace lacks the view, the directory is empty and cannot be changed; here it stays."""
    before = mounts.mount_at(str(shared_place.snapshots))
    look = 'umount -l "$0" && ls -A "$0" && stat -c %a "$0" && ! touch "$0/new" 2>&1 && ! mkdir "$0/new" 2>&1 && ls -A "$0/.."'
    said = _out(
        "unshare", "-m", "--propagation", "slave", "sh", "-c", look, shared_place.snapshots
    ).splitlines()
    assert said[0] == "555"
    assert [line.rpartition(": ")[2] for line in said[1:]] == ["Read-only file system"] * 2
    assert shared_place.answers()
    assert mounts.mount_at(str(shared_place.snapshots)) == before


def test_a_hung_view_holds_nobody_up(place: Place) -> None:
    """With a stopped process the root is used, cut and unmounted as ever."""
    (place.root / "file").write_text("1")
    place.start()
    (pid,) = place.view_pids()
    os.kill(pid, signal.SIGSTOP)
    (place.root / "file").write_text("2")
    assert os.listdir(place.root) == ["file"]
    assert _out("find", place.root, "-type", "f") == f"{place.root}/file\n"
    place.live.snapshot()
    (place.root / "made").mkdir()
    assert place.live.stop() == 0
    assert mounts.overlay_at(str(place.root)) is None
    assert not place.is_mounted()
    until("the end of the processes", lambda: not place.live.processes())


@pytest.mark.skipif(Capability.DAC_READ_SEARCH not in permitted(), reason="there is nothing to keep then")
def test_the_process_can_only_read(shared_place: Place) -> None:
    """It keeps the capability of a reader, gains none, is filtered, and yields to the job."""
    (pid,) = shared_place.view_pids()
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = {key: value.strip() for key, _, value in lines}
    kept = f"{1 << Capability.DAC_READ_SEARCH:016x}"
    assert (found["CapPrm"], found["CapEff"], found["CapInh"]) == (kept, kept, f"{0:016x}")
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19


def test_another_user_reads_no_more_than_then(shared_place: Place) -> None:
    """Owners, modes and ACLs of files, directories and the root itself count as they were at the snapshot."""
    root = shared_place.root
    (root / "open").write_text("open")
    (root / "closed").write_text("closed")
    (root / "closed").chmod(0o600)
    (root / "shared").write_text("shared")
    (root / "shared").chmod(0o600)
    subprocess.run(["setfacl", "-m", f"u:{_OTHER_USER.uid}:r", root / "shared"], check=True)
    (root / "dir").mkdir(mode=0o700)
    (root / "dir/file").write_text("inside")
    then = shared_place.snapshot()
    root.chmod(0o700)
    closed_root = shared_place.snapshot()
    root.chmod(0o755)
    for name in ("closed", "dir"):
        (root / name).chmod(0o755)
    (root / "open").chmod(0o600)
    subprocess.run(["setfacl", "-b", root / "shared"], check=True)

    def reads(path: Path) -> str:
        done = run_as(_OTHER_USER, _READ, str(path))
        return done.stdout if done.returncode == 0 else "refused"

    assert [reads(then / name) for name in ("open", "closed", "shared", "dir/file")] == [
        *("open", "refused", "shared", "refused")
    ]
    assert reads(closed_root / "open") == "refused"
    assert stat.S_IMODE(closed_root.stat().st_mode) == 0o700
    assert run_as(_OTHER_USER, _LIST, str(then)).returncode == 0
    assert run_as(_OTHER_USER, _LIST, str(closed_root)).returncode != 0
    root.chmod(0o700)
    assert run_as(_OTHER_USER, _LIST, str(shared_place.snapshots)).returncode != 0
