"""Attacker: a local user who holds very many descriptors, or descriptors of very deep directories."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.deep_trees import remove_chain
from support.overlay import DRIVER, Overlay
from support.second_user import MADE_UP
from support.until import until

from ciuic.fuse_layer.state.passthrough_state import Quota
from ciuic.system import bypass
from ciuic.system.bypass import find_bypassing

DEEP_NAME = b"x" * 200
_HOLDER = """
import os, sys
levels, every = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
fd, held = os.open(".", os.O_RDONLY), []
name = "x" * 200
for level in range(levels):
    try:
        os.mkdir(name, dir_fd=fd)
    except FileExistsError:
        pass
    below = os.open(name, os.O_RDONLY, dir_fd=fd)
    if level % every:
        os.close(fd)
    else:
        held.append(fd)
    fd = below
if len(sys.argv) > 3:
    held.append(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(top: Path, levels: int, every: int, *more: str) -> Iterator[int]:
    """Run another user's process that holds every nth directory of a chain and the deepest; yield its pid."""
    os.chown(top, MADE_UP.uid, MADE_UP.gid)
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(levels), str(every), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=top,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        child.stdin.close()
        child.wait(60)
        child.stdout.close()
        remove_chain(top, DEEP_NAME)


@pytest.fixture
def counted_opens(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record every path that the scan opens."""
    opened: list[bytes] = []
    real = os.open

    def counting(path: str | bytes | Path, *arguments: object, **more: object) -> int:
        opened.append(os.fsencode(path))
        return real(path, *arguments, **more)  # type: ignore[arg-type]

    for module in (bypass, bypass):
        if hasattr(module, "os"):
            monkeypatch.setattr(module.os, "open", counting)
    return opened


def test_directories_deeper_than_any_path_keep_no_other_root_from_being_looked_after(
    tmp_path: Path, counted_opens: list[bytes]
) -> None:
    """Holders of very deep directories outside a root are recognized with a few system calls each."""
    root, other_root = tmp_path / "root", tmp_path / "beside"
    root.mkdir()
    other_root.mkdir()
    with holding(other_root, 3000, 100) as pid:
        assert find_bypassing(root, only_pids={pid}) == []
        assert len(counted_opens) < 30 * 40
        (found,) = find_bypassing(other_root, only_pids={pid})
        assert found.writes
        assert found.known


def test_a_process_that_cannot_be_examined_counts_as_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that cannot be examined in depth or in time is reported as a possible bypass, unaccused."""
    root, other_root = tmp_path / "root", tmp_path / "beside"
    root.mkdir()
    other_root.mkdir()
    with holding(other_root, 50, 10, "and a file") as pid:
        (found,) = find_bypassing(root, only_pids={pid})
        assert (found.writes, found.known) == (True, False)
        (found,) = find_bypassing(other_root, only_pids={pid})
        assert found.known
        monkeypatch.setattr(bypass, "Climber", partial(bypass.Climber, seconds=0))
        (found,) = find_bypassing(root, only_pids={pid})
        assert not found.known


def test_deep_directories_of_other_file_systems_are_not_looked_into(
    counted_opens: list[bytes], tmp_path: Path
) -> None:
    """Deep directories of other file systems are skipped by the mount id before any other call."""
    top = Path("/dev/shm") / f"ciuic-test-{os.getpid()}"
    top.mkdir()
    try:
        with holding(top, 60, 1) as pid:
            before = len(counted_opens)
            assert find_bypassing(tmp_path, only_pids={pid}) == []
            assert not [path for path in counted_opens[before:] if path.startswith(b"..")]
    finally:
        top.rmdir()


# -- descriptors of a worker

_TAKER = """
import os, sys, resource
kind, wanted, top = sys.argv[1], int(sys.argv[2]), sys.argv[3]
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
held, refused = [], 0
for number in range(wanted):
    name = "shared" if kind == "same" else f"{number:05d}"
    flags = os.O_RDONLY
    if kind == "directories":
        name, flags = f"d{number:05d}", flags | os.O_DIRECTORY
    try:
        held.append(os.open(os.path.join(top, name), flags))
    except OSError as error:
        refused = error.errno
        break
print(len(held), refused, flush=True)
sys.stdin.read()
"""
LIMIT = 1024
"""The worker's descriptor limit: low, so that hundreds of opens use it up and not hundreds of thousands."""
OWNER = 54322


@contextmanager
def taking(kind: str, wanted: int, top: Path) -> Iterator[tuple[int, int]]:
    """Let a user hold as many descriptors as it gets; return the number and the first refusal's errno."""
    with subprocess.Popen(
        [sys.executable, "-c", _TAKER, kind, str(wanted), str(top)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    ) as child:
        assert child.stdout is not None
        try:
            held, refused = child.stdout.readline().split()
            yield int(held), int(refused)
        finally:
            child.kill()


def works_for(uid: int, top: Path) -> None:
    """Run cat, touch, ls, a new file, a new directory and many files at once, as in finding 6."""
    script = (
        "import os, sys\n"
        f"os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})\n"
        "os.chdir(sys.argv[1])\n"
        "assert open('shared').read() == 'content'\n"
        "assert len(os.listdir('.')) > 100\n"
        "held = [open('%05d' % number) for number in range(20)]\n"
        "assert os.stat('shared').st_size == 7\n"
        "if os.access('.', os.W_OK):\n"
        "    open('new', 'w').write('x'); os.utime('new'); os.mkdir('newdir'); os.rename('new', 'newdir/moved')\n"
        "    os.unlink('newdir/moved'); os.rmdir('newdir')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(top)], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def root(short_tmp: Path) -> Path:
    """Provide a user's directory, readable by all, with more entries than the worker has descriptors."""
    top = short_tmp / "root"
    top.mkdir()
    for above in (top, *top.parents[:-2]):
        above.chmod(above.stat().st_mode | 0o055)
    (top / "shared").write_text("content")
    for number in range(2 * LIMIT):
        (top / f"{number:05d}").touch()
        (top / f"d{number:05d}").mkdir()
    os.chown(top, OWNER, OWNER)
    return top


@contextmanager
def limited_overlay(root: Path, limit: int) -> Iterator[Overlay]:
    """Provide a worker without CAP_SYS_RESOURCE, which cannot raise its descriptor limit."""
    with Overlay(root, root.parent / "w.sock", interpreter=limited(limit)) as overlay:
        yield overlay


def limited(limit: int) -> list[str]:
    """Run an interpreter with this limit for good."""
    script = (
        "import os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "import ctypes\n"
        # PR_CAPBSET_DROP, CAP_SYS_RESOURCE: execve gives no more.
        "ctypes.CDLL(None).prctl(24, 24, 0, 0, 0)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    return [sys.executable, "-c", script]


def descriptors(overlay: Overlay) -> int:
    return len(os.listdir(f"/proc/{overlay.process.pid}/fd"))


@pytest.mark.mount
def test_readers_of_one_file_share_descriptors(root: Path) -> None:
    """Another user's 20,000 opens of one readable file take a few descriptors of the worker.

    A successor opens no more.
    """
    with Overlay(root, root.parent / "w.sock") as overlay:
        before = descriptors(overlay)
        wanted = min(19_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 100)
        with taking("same", wanted, root) as (held, refused):
            assert (held, refused) == (wanted, 0)
            assert descriptors(overlay) - before < 100
            works_for(OWNER, root)
            if DRIVER != "pyfuse3":
                overlay.keep_session()
                overlay.process.kill()
                overlay.succeed()
                assert descriptors(overlay) - before < 100
                works_for(OWNER, root)


@pytest.mark.mount
@pytest.mark.parametrize("kind", ["different", "directories"])
def test_only_the_user_who_takes_all_descriptors_is_refused(root: Path, kind: str) -> None:
    """A user who takes all descriptors is refused with EMFILE; the owner, root and a third user go on."""
    with limited_overlay(root, LIMIT) as overlay:
        with taking(kind, 2 * LIMIT, root) as (held, refused):
            assert refused == errno.EMFILE
            assert LIMIT // 8 < held < LIMIT
            for uid in (OWNER, 0, 54323):
                works_for(uid, root)
            if DRIVER != "pyfuse3" and kind == "different":
                overlay.keep_session()
                overlay.process.kill()
                overlay.succeed()
                works_for(OWNER, root)
        until("what was held to be given back", lambda: descriptors(overlay) < LIMIT // 2)


@pytest.mark.mount
def test_listings_of_one_directory_are_in_memory_once(root: Path) -> None:
    """Hundreds of open listings of a directory with thousands of names cost the worker little memory."""
    script = (
        "import os, sys, ctypes\n"
        "os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)\n"
        "held = []\n"
        "for _ in range(300):\n"
        "    scan = os.scandir(sys.argv[1]); next(scan); held.append(scan)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with Overlay(root, root.parent / "w.sock") as overlay:
        before = _rss_kib(overlay.process.pid)
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            # 49 to 63 MiB alone, and 95 once beside other tests.
            assert _rss_kib(overlay.process.pid) - before < 128 << 10
            child.kill()


def _rss_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_root_and_the_owner_keep_their_share_against_many_users() -> None:
    """Root and the owner keep their share when several users take all they can, and a new user gets some."""
    quota = Quota(8000, owner=lambda: OWNER)

    def take_all(uid: int) -> None:
        while True:
            quota.check(uid)
            quota.add(uid)

    for uid in range(1000, 1005):
        with pytest.raises(OSError, match="Too many open files"):
            take_all(uid)
    assert quota.held(1000) > 4000
    assert quota.held(1004) > 0
    for uid in (0, OWNER):
        for _ in range(400):
            quota.check(uid)
            quota.add(uid)
    for uid in range(1000, 1005):
        quota.give_back(uid, quota.held(uid))
    assert quota.held(1000) == 0
    for _ in range(4000):
        quota.check(1000)
        quota.add(1000)
    assert quota.held(1000) == 4000


def test_descriptors_released_by_garbage_collection_are_counted() -> None:
    """Descriptors that garbage collection releases in another thread's work are counted without deadlock."""
    quota = Quota(1000)

    def take_and_drop() -> None:
        for _ in range(20_000):
            quota.add(7)
            quota.give_back(7)
            quota.add(7)
            quota.remove(7)

    threads = [threading.Thread(target=take_and_drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert quota.held(7) == 0
