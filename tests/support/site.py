"""Private daemon: directories, configuration, the process, and its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import impatient_daemon
from support.overlay import DRIVER
from support.until import until

from ciuic.errors import CiuicError
from ciuic.protocol.control import ControlClient
from ciuic.protocol.control_types import RootStatus
from ciuic.repository import Repository
from ciuic.system import mountinfo
from ciuic.types import ChunkId

CHECKOUT = Path(__file__).parents[2]


def ended(pid: int) -> bool:
    """Return whether the process has ended; a zombie, which only waits for its parent, has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


_PASS_ON = """
import ast, os, sys
fds, variables = ast.literal_eval(sys.argv[1]), ast.literal_eval(sys.argv[2])
high = [os.dup2(fd, 200 + at, inheritable=False) for at, fd in enumerate(fds)]
for at, fd in enumerate(high):
    os.dup2(fd, 3 + at)
os.environ.update(variables, LISTEN_PID=str(os.getpid()))
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


class Site:
    """Directory with roots, repository, configuration and, optionally, a daemon."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.config = top / "ciuic.toml"
        self.socket = top / "run/control.sock"
        self.roots: list[Path] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.log = top / "daemon.log"
        self.environment: dict[str, str] = {}
        self.driver = DRIVER
        self.stored: Mapping[str, int] = {}
        self.own_group = False
        """The daemon leads a session and a process group, as a shell's job does."""
        self.impatient = False
        """The daemon does not wait long before it looks or tries again."""

    def root(self, name: str) -> Path:
        path = self.top / name
        path.mkdir(exist_ok=True)
        self.roots.append(path)
        return path

    def write_config(self) -> None:
        tables = "".join(f'[[root]]\npath = "{path}"\ndriver = "{self.driver}"\n' for path in self.roots)
        self.config.write_text(
            f'[repository]\npath = "{self.top}/repository"\n[daemon]\nruntime_dir = "{self.top}/run"\n[capture]\nmin_share = "100%"\n{tables}'
        )

    def launch(self) -> subprocess.Popen[bytes]:
        self.write_config()
        program = [str(impatient_daemon.PROGRAM)] if self.impatient else ["-m", "ciuic"]
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [*self._service_manager(), *program, "--config", str(self.config), "daemon"],
                env={**os.environ, **self.environment, "PYTHONPATH": str(CHECKOUT)},
                cwd=self.top,
                pass_fds=tuple(self.stored.values()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=self.own_group,
            )

    def _service_manager(self) -> list[str]:
        """Start the interpreter with the stored descriptors, as sd_listen_fds(3) describes."""
        if not self.stored:
            return [sys.executable]
        names, numbers = ":".join(self.stored), list(self.stored.values())
        variables = {"LISTEN_FDS": str(len(numbers)), "LISTEN_FDNAMES": names}
        return [sys.executable, "-c", _PASS_ON, repr(numbers), repr(variables)]

    def start(self) -> None:
        """Start the daemon; return when every root is mounted."""
        self.process = self.launch()
        try:
            until("the mount of every root", self._all_mounted)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {self.log.read_text()[-3000:]}") from None

    def restart_with(self, stored: Mapping[str, int]) -> None:
        """Start it with descriptors that a service manager kept; return when every root is mounted."""
        self.stored = stored
        self.start()

    def _all_mounted(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            with self.client() as client:
                return {root.path for root in client.status().roots if root.state == "mounted"} == set(
                    map(str, self.roots)
                )
        except CiuicError:
            return False

    @contextmanager
    def client(self) -> Iterator[ControlClient]:
        with ControlClient(self.socket) as client:
            yield client

    def snapshot(self) -> str:
        with self.client() as client:
            state = client.take_snapshot(wait=True)
        assert state.state == "committed"
        return state.id

    def snapshot_until_tracking(self, root: Path) -> None:
        """Take snapshots until the next one of ``root`` needs to read only what changed.

        One is enough where the search for processes that bypass the overlay has ended before it.
        """
        for _ in range(10):
            self.snapshot()
            if self.root_status(root).tracking:
                return
        raise AssertionError(f"tracking does not count: {self.log.read_text()[-6000:]}")

    def has_schedule(self) -> bool:
        """Return whether the schedule's snapshots at the start are queued, which later requests follow."""
        with self.client() as client:
            return client.status().next_snapshot is not None

    def has_first(self) -> bool:
        """Return whether the schedule's first snapshot is committed: it is of no moment between a test's own changes then."""
        with self.client() as client:
            status = client.status()
        return status.last_snapshot is not None and not status.captures

    def root_status(self, path: Path) -> RootStatus:
        with self.client() as client:
            return next(root for root in client.status().roots if root.path == str(path))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(60)
        self.process = None
        return status

    def stop(self) -> None:
        assert self.kill(signal.SIGTERM) == 0, self.log.read_text()[-3000:]

    def overlays(self, path: Path) -> int:
        return sum(
            mount.fs_type == b"fuse.ciuic"
            for mount in mountinfo.mounts_at(os.fsencode(path), mountinfo.read())
        )

    def content(self, snapshot: str, root: Path, name: bytes) -> bytes:
        """Return the bytes of a small file of one block in a snapshot."""
        with Repository.open(self.top / "repository") as repository:
            loaded = repository.snapshots.load(repository.snapshots.resolve(snapshot))
            record = next(record for record in loaded.roots if record.path == os.fsencode(root))
            entry = repository.trees.entry(record.entry.content, name)
            assert entry is not None
            return repository.chunks.get(ChunkId(entry.content))[: entry.size_bytes] if entry.content else b""


@contextmanager
def site_in(top: Path, *, driver: str = DRIVER) -> Iterator[Site]:
    """Yield a site whose daemon does not outlive it."""
    made = Site(top)
    made.driver = driver
    try:
        yield made
    finally:
        if made.process is not None:
            made.process.send_signal(signal.SIGTERM)
            try:
                made.process.wait(60)
            except subprocess.TimeoutExpired:
                made.process.kill()
                made.process.wait()


@pytest.fixture
def site(short_tmp: Path) -> Iterator[Site]:
    """Provide a site without roots and without a daemon."""
    with site_in(short_tmp) as made:
        yield made


@contextmanager
def running_site(top: Path, *roots: str) -> Iterator[Site]:
    """Yield a site with a daemon whose first snapshot, of empty roots, is committed."""
    with site_in(top) as made:
        for name in roots:
            made.root(name)
        made.start()
        # Otherwise it may come between the test's own, or between two writes.
        until("the first snapshot", made.has_first)
        yield made


@pytest.fixture(name="site")
def kernel_site(short_tmp: Path) -> Iterator[Site]:
    """Give a test a site whose sessions outlive their workers."""
    with site_in(short_tmp, driver="kernel") as made:
        yield made
