"""Tests of the process that holds sessions without systemd: its hand-outs and its end."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from support.fake_daemon import FakeOverlay, FakeWorker
from support.second_user import MADE_UP, run_as
from support.until import until, until_async

from ciuic.daemon.base.settings import RootSettings
from ciuic.daemon.roots import mount_hooks, sessions
from ciuic.daemon.roots.mount_hooks import RealMounts
from ciuic.daemon.roots.sessions import SessionKeeper, SessionStore
from ciuic.daemon.roots.worker_process import WorkerDied, WorkerOptions
from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.system.child_process import environment
from ciuic.system.sd_daemon import Notifier


class Bench:
    """Daemons that share a runtime directory, and workers whose connections are pipes."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.spares: list[SpareProcess] = []
        self.workers: list[FakeWorker] = []
        self.other_ends: list[int] = []

    def daemon(self) -> SessionKeeper:
        self.spares.append(SpareProcess(self.top, environment(), keeps=True))
        return SessionKeeper(self.spares[-1], self.top)

    def worker(self) -> tuple[FakeWorker, int]:
        """Return a worker with an open connection, and the inode number that identifies it."""
        worker = FakeWorker(FakeOverlay(), "s")
        self.workers.append(worker)
        reader, writer = os.pipe()
        self.other_ends.append(writer)
        worker.session_fd = reader
        return worker, os.fstat(reader).st_ino

    def keeping(self, root: str) -> tuple[SessionKeeper, FakeWorker]:
        """Return a daemon whose keeper holds the session of a worker of ``root``, and that worker."""
        daemon, (worker, _) = self.daemon(), self.worker()
        trio.run(daemon.keep, self.options(root), worker)
        assert self.spares[-1].tell({"do": "take", "root": root})
        return daemon, worker

    def options(self, root: str) -> WorkerOptions:
        return WorkerOptions(root, self.top / "none.sock", "kernel", 4096, 4096)

    def sockets(self) -> list[Path]:
        return sorted(self.top.glob("keeper-*.sock"))

    @contextmanager
    def connected(self, spare: SpareProcess) -> Iterator[socket.socket]:
        """Return a connection like that of the next daemon."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(20)
            connection.connect(spare.listens_at)
            yield connection

    def kill(self, spare: SpareProcess) -> None:
        """Kill the daemon of this keeper: its connection closes without a message."""
        spare.close(leave=True)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.close()
        for spare in self.spares:
            if (pid := spare.pid) is not None:
                os.kill(pid, signal.SIGKILL)
            spare.close()
        for end in self.other_ends:
            os.close(end)


@pytest.fixture
def bench(short_tmp: Path) -> Iterator[Bench]:
    made = Bench(short_tmp)
    try:
        yield made
    finally:
        made.close()


def _ended(pid: int | None) -> Callable[[], bool]:
    assert pid is not None

    def look() -> bool:
        try:
            return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    return look


def _inode(fds: tuple[int, int]) -> int:
    """Return the inode of the session, and close both descriptors."""
    inode = os.fstat(fds[0]).st_ino
    for fd in fds:
        os.close(fd)
    return inode


def test_the_next_daemon_gets_the_sessions_of_the_last_one(bench: Bench) -> None:
    """The next daemon gets each root's session, and those of roots it does not serve are closed."""
    first, second = bench.daemon(), bench.daemon()
    worker, inode = bench.worker()
    other, _ = bench.worker()

    async def main() -> None:
        await first.keep(bench.options("/a"), worker)
        await first.keep(bench.options("/b"), other)
        pid = bench.spares[0].pid
        bench.kill(bench.spares[0])
        found = await second.inherit(["/a", "/c"])
        assert list(found) == ["/a"]
        assert _inode(found["/a"]) == inode
        await second.keep(bench.options("/a"), worker)
        assert bench.spares[1].tell({"do": "take", "root": "/a"})
        await second.end_predecessors()
        await until_async(_ended(pid))
        assert [str(path) for path in bench.sockets()] == [bench.spares[1].listens_at]

    trio.run(main)


def test_keeper_without_sessions_ends_with_its_daemon(bench: Bench) -> None:
    """Processes and sockets are gone once no session is kept, after a stop or an unprotect."""
    daemon, _ = bench.keeping("/a")

    async def main() -> None:
        await daemon.drop("/a")
        assert not bench.spares[0].tell({"do": "take", "root": "/a"})

    trio.run(main)
    pid = bench.spares[0].pid
    bench.spares[0].close()
    assert _ended(pid)()
    assert bench.sockets() == []


def test_a_session_that_is_mounted_nowhere_is_let_go_of(bench: Bench) -> None:
    """The session of a worker that ends while no daemon runs is closed, as nothing can continue it."""
    _, worker = bench.keeping("/nowhere")
    pid = bench.spares[0].pid
    bench.kill(bench.spares[0])
    with bench.connected(bench.spares[0]) as next_daemon:
        next_daemon.send(b'{"do": "take", "root": "/nowhere"}')
        answer, fds, _, _ = socket.recv_fds(next_daemon, 100, 4)
        for fd in fds:
            os.close(fd)
    # The worker lives.
    assert (answer, len(fds)) == (b"true", 2)
    worker.kill()
    until("the keeper's end", _ended(pid))
    assert bench.sockets() == []


def test_killed_keeper_is_replaced_and_gets_all_sessions(bench: Bench) -> None:
    """A keeper that is killed is replaced, and the new one gets only sessions still kept and served."""
    daemon = bench.daemon()
    (a, _), (b, _), (c, _) = (bench.worker() for _ in range(3))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.run)
            for root, worker in (("/a", a), ("/b", b), ("/c", c)):
                await daemon.keep(bench.options(root), worker)
            await daemon.drop("/b")
            c.kill()
            c.close()
            before = bench.spares[0].pid
            assert before is not None
            os.kill(before, signal.SIGKILL)
            await until_async(lambda: bench.spares[0].pid not in (None, before))
            await until_async(lambda: bench.spares[0].tell({"do": "take", "root": "/a"}))
            assert not any(bench.spares[0].tell({"do": "take", "root": root}) for root in ("/b", "/c"))
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_hanging_keeper_is_killed_and_replaced(bench: Bench) -> None:
    """A keeper that hangs is killed before it is replaced, so there are never two."""
    daemon, worker = bench.keeping("/a")

    async def main() -> None:
        pid = bench.spares[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        connection = bench.spares[0]._socket
        assert connection is not None
        connection.settimeout(0.5)
        await daemon.keep(bench.options("/a"), worker)
        await until_async(_ended(pid))
        await daemon.keep(bench.options("/a"), worker)
        assert bench.spares[0].tell({"do": "take", "root": "/a"})

    trio.run(main)


def test_a_hanging_keeper_of_an_earlier_daemon_is_killed_when_another_holds_its_sessions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that was stopped ends, and its socket with it, not before this daemon's keeper has the session."""
    monkeypatch.setattr(sessions, "_ANSWER_SECONDS", 0.2)
    _, worker = bench.keeping("/a")
    hanging, (socket_path,) = bench.spares[0].pid, bench.sockets()
    bench.kill(bench.spares[0])
    assert hanging is not None
    os.kill(hanging, signal.SIGSTOP)
    second = bench.daemon()

    async def main() -> None:
        assert await second.inherit(["/a"]) == {}
        await second.keep(bench.options("/a"), worker)
        assert not _ended(hanging)()
        await second.end_predecessors()

    trio.run(main)
    until("the end of the keeper", _ended(hanging))
    assert socket_path not in bench.sockets()
    assert bench.spares[1].tell({"do": "take", "root": "/a"})


def test_a_session_whose_successors_keep_dying_is_served_without_tracking(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that a daemon finds at its start is served by a worker that tracks nothing after five that died."""
    worker, _ = bench.worker()
    assert worker.session_fd is not None
    stored = {
        sessions._name("session", "/a"): os.dup(worker.session_fd),
        sessions._name("backing", "/a"): os.dup(worker.backing_fd),
    }
    asked = []

    async def start(
        options: WorkerOptions, backing_fd: int, session_fd: int | None, **rest: object
    ) -> FakeWorker:
        await trio.lowlevel.checkpoint()
        os.close(backing_fd)
        asked.append(options.plain)
        if not options.plain:
            raise WorkerDied("it has a defect in its tracking")
        return worker

    monkeypatch.setattr(mount_hooks, "start_worker", start)
    monkeypatch.setattr(mount_hooks, "is_mounted", lambda root: True)
    monkeypatch.setattr("ciuic.fuse_layer.journal.succession.SUCCESSION_SECONDS", (0.0,) * 8)
    hooks = RealMounts(
        lambda settings: bench.options("/a"), lambda root: (), kept=SessionStore(Notifier(), stored)
    )
    assert trio.run(hooks.establish, RootSettings("/a")) is worker
    assert asked == [False] * 5 + [True]


def test_garbage_and_requests_of_another_version_end_nothing(bench: Bench) -> None:
    """Garbage and requests of another version close their connection, and what is held stays."""
    bench.keeping("/a")
    messages = (b"{", b"{}", b'{"do": "dance"}', b'{"do": "keep", "root": "/a"}', b"[1]", b"null")
    for message in messages:
        with bench.connected(bench.spares[0]) as one:
            one.send(message)
            assert one.recv(100) == b""
    assert bench.spares[0].tell({"do": "take", "root": "/a"})


def test_a_request_that_is_refused_leaves_no_descriptor_open(bench: Bench) -> None:
    """A refused request leaves no descriptor open, as one would keep the session's mount alive."""
    bench.keeping("/a")
    pid = bench.spares[0].pid
    before = sorted(os.listdir(f"/proc/{pid}/fd"))
    for message in (b"{", b'{"do": "keep", "root": "/b"}', b'{"do": "dance"}', b"[1]"):
        with bench.connected(bench.spares[0]) as one:
            socket.send_fds(one, [message], [0, 1, 2])
            assert one.recv(100) == b""
    # Answers come in order, so this one means that earlier requests are done.
    with bench.connected(bench.spares[0]) as one:
        one.send(b'{"do": "take", "root": "/none"}')
        assert one.recv(100) == b"false"
        during = sorted(os.listdir(f"/proc/{pid}/fd"))
    assert len(during) == len(before) + 1


def test_a_keeper_that_cannot_be_watched_ends_no_daemon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon out of descriptors watches its keeper later, and then replaces one that was killed."""
    daemon, _ = bench.keeping("/a")
    spare = bench.spares[0]
    real, refused = spare.open_pidfd, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 2

    def open_pidfd() -> int | None:
        if refused:
            raise refused.pop()
        return real()

    monkeypatch.setattr(spare, "open_pidfd", open_pidfd)
    monkeypatch.setattr(sessions, "_UNWATCHED_SECONDS", 0.01)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.run)
            before = spare.pid
            assert before is not None
            await until_async(lambda: not refused)
            os.kill(before, signal.SIGKILL)
            await until_async(lambda: spare.pid not in (None, before))
            await until_async(lambda: spare.tell({"do": "take", "root": "/a"}))
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_keepers_of_earlier_daemons_are_not_ended_during_a_request(bench: Bench) -> None:
    """Keepers of earlier daemons are not ended during a request, whose answer a second thread would take."""
    bench.keeping("/a")
    bench.kill(bench.spares[0])
    second = bench.daemon()

    async def main() -> None:
        (fds,) = (await second.inherit(["/a"])).values()
        assert _inode(fds)
        async with trio.open_nursery() as nursery, second._lock:
            nursery.start_soon(second.end_predecessors)
            await trio.sleep(0.2)
            assert len(second._predecessors) == 1
        assert second._predecessors == []

    trio.run(main)


def test_a_process_that_cannot_be_started_leaves_no_name(tmp_path: Path) -> None:
    """The socket of a keeper that cannot be started is removed, or every later daemon would connect to it."""
    spare = SpareProcess(tmp_path, environment(), keeps=True, prefix=("/no/such/program",))
    spare.prepare()
    assert spare.pid is None
    assert os.listdir(tmp_path) == []


def test_a_session_is_held_until_its_worker_is_kept_or_given_up(bench: Bench) -> None:
    """A predecessor's keeper ends, and the inherited descriptors close, when each session is kept or given up."""
    first, second = bench.daemon(), bench.daemon()
    (a, inode), (b, _) = bench.worker(), bench.worker()

    async def main() -> None:
        for root, worker in (("/a", a), ("/b", b)):
            await first.keep(bench.options(root), worker)
        pid = bench.spares[0].pid
        bench.kill(bench.spares[0])
        stored: dict[str, int] = {}
        store = SessionStore(Notifier(), stored, second)
        await store.inherit(["/a", "/b"], prepare=False)
        await store.close_rest(["/a", "/b"])
        await store.drop("/b")
        found = store.held("/a")
        assert found is not None
        assert os.fstat(found[0]).st_ino == inode
        assert not _ended(pid)()
        await store.keep(bench.options("/a"), a)
        assert stored == {}
        await until_async(_ended(pid))

    trio.run(main)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_only_root_gets_a_session(bench: Bench) -> None:
    """The socket is root's with mode 0600, and a connection of another user is closed without an answer."""
    bench.keeping("/a")
    path = Path(bench.spares[0].listens_at)
    assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o600, 0)
    for parent in (path.parent, path.parent.parent):
        parent.chmod(0o711)
    script = (
        "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(20)\n"
        'try:\n    s.connect(sys.argv[1]); s.send(b\'{"do": "take", "root": "/a"}\'); print(socket.recv_fds(s, 10, 2)[:2])\n'
        "except OSError as error:\n    print(type(error).__name__)\n"
    )
    assert run_as(MADE_UP, script, str(path)).stdout.strip() == "PermissionError"
    path.chmod(0o666)
    assert run_as(MADE_UP, script, str(path)).stdout.strip() in (
        "(b'', [])",
        "BrokenPipeError",
        "ConnectionResetError",
    )


def test_systemd_and_a_keeper_may_both_have_kept_a_session(bench: Bench) -> None:
    """A session kept by systemd and by a keeper is handed out once, and the other descriptors are closed."""
    first, second = bench.daemon(), bench.daemon()
    worker, inode = bench.worker()

    async def main() -> None:
        await SessionStore(Notifier(), {}, first).keep(bench.options("/a"), worker)
        bench.kill(bench.spares[0])
        stored: dict[str, int] = {}
        store = SessionStore(Notifier(), stored, second)
        await store.inherit(["/a"], prepare=False)
        names = sorted(stored)
        await store.inherit(["/a"], prepare=False)
        assert sorted(stored) == names
        found = store.held("/a")
        assert found is not None
        assert os.fstat(found[0]).st_ino == inode
        await store.close_rest([])
        assert stored == {}

    trio.run(main)
