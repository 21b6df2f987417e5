"""Sessions of mounted roots, kept where they outlive the daemon: in systemd's descriptor store or a keeper process.

A session is the root's connection with the kernel. While any process has it open, the mount outlives its
worker. The daemon has it open while it runs. Besides, systemd's descriptor store has it (sd_notify(3),
FDSTORE), and where systemd does not start the daemon, a keeper (fuse_layer/prefork/keeper.py).

Guarantees: a session that `keep` has returned for outlives the daemon and the worker together; when the
keeper itself ends, another one is started and told of every session that is served then; sessions of a killed
daemon's keeper are handed to this daemon, and released by that keeper root by root, once this daemon's own
keeper has them. A failure costs the third holder of a session and nothing else, and is logged.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
import trio

from ciuic.daemon.roots.worker_process import (
    OverlayWorker,
    WorkerOptions,
    ask_session,
    successor_arguments,
)
from ciuic.fuse_layer.prefork import keeper, messages
from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.system.sd_daemon import Notifier
from ciuic.system.unix_sockets import credentials

# Time limit for the answer of a predecessor's keeper: longer than the start of a worker, which may be in
# progress there.
_ANSWER_SECONDS: Final = keeper.START_SECONDS + 10.0
# Pauses before another keeper is started, by the number of keepers that ended in a row.
_AGAIN_SECONDS: Final = (0.0, 0.5, 2.0, 10.0, 30.0)
# Life of a keeper that ends the row.
_STABLE_SECONDS: Final = 60.0
# Pause before another attempt to watch a keeper where no descriptor was to be had.
_UNWATCHED_SECONDS: Final = 1.0
# Process id of systemd, whose descriptor store keeps what the daemon sends to NOTIFY_SOCKET.
_SERVICE_MANAGER: Final = 1
_KINDS: Final = ("session", "backing")
log = structlog.get_logger(__name__)


class _Predecessor:
    """Connection to a keeper that another daemon has started.

    Calls block, and raise OSError when it does not answer.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_SECONDS)
        self._path, self._is_silent = path, False
        try:
            self._socket.connect(str(path))
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, root: str) -> list[int]:
        """Send one request, and return the descriptors that come with the answer."""
        # A late answer would be taken for that of the next request.
        if self._is_silent:
            raise TimeoutError("the keeper hangs")
        try:
            messages.send(self._socket, {"do": what, "root": root})
            answer, fds = messages.receive(self._socket)
        except TimeoutError:
            self._is_silent = True
            raise
        if answer is None:
            raise ConnectionResetError("the keeper has ended")
        return fds

    def kill_if_silent(self) -> None:
        """Kill a keeper that has left a request unanswered: it would go on with sessions that another one holds by now."""
        pid = credentials(self._socket).pid
        if self._is_silent and b"ciuic.fuse_layer.standby" in Path(f"/proc/{pid}/cmdline").read_bytes():
            log.error("keeper_hangs", pid=pid)
            os.kill(pid, signal.SIGKILL)
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the connection, so that the keeper starts workers again for sessions that it still holds."""
        self._socket.close()


# Without a keeper, SIGKILL of daemon and worker together made every call of the job answer ENOTCONN until a
# daemon was started, and descriptors that were opened before stayed dead. With it a successor answers 28 ms
# after the kill (docs/decisions/keeper-of-sessions.md).
class SessionKeeper:
    """Keeper of this daemon, and keepers of daemons before it. Belongs to the trio thread."""

    def __init__(self, spare: SpareProcess, directory: Path) -> None:
        self._spare = spare
        self._directory = directory
        self._predecessors: list[_Predecessor] = []
        self._begun = trio.Event()
        # Sessions that the keeper was told to hold, by root.
        self._told: dict[str, tuple[WorkerOptions, OverlayWorker]] = {}
        # Held while a keeper is told something, so that a repeated `keep` never arrives after the `drop` of
        # the same session.
        self._lock = trio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the keeper; None without one."""
        return self._spare.pid

    async def inherit(self, roots: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return the session and backing descriptors of those of ``roots`` that a predecessor's keeper holds.

        The caller owns them.

        From here on until `end_predecessors`, or the end of this process, those keepers start no worker.
        """
        return await trio.to_thread.run_sync(self._inherit, tuple(roots))

    def _inherit(self, roots: Iterable[str]) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for path in sorted(self._directory.glob(f"{messages.KEEPER_PREFIX}*.sock")):
            if str(path) == self._spare.listens_at:
                continue
            try:
                predecessor = _Predecessor(path)
            except ConnectionRefusedError:  # it was killed
                path.unlink(missing_ok=True)
                continue
            except OSError as error:
                log.warning("keeper_does_not_answer", path=str(path), error=str(error))
                continue
            self._predecessors.append(predecessor)
            try:
                # The keeper answers nobody while it starts a worker, so an answer says that none is being
                # started.
                predecessor.ask("take", "")
                for root in roots:
                    self._add(found, root, predecessor.ask("take", root))
            except OSError as error:
                log.warning("keeper_lost", path=str(path), error=str(error))
        if found:
            log.info("sessions_inherited", roots=sorted(found))
        return found

    @staticmethod
    def _add(found: dict[str, tuple[int, int]], root: str, fds: list[int]) -> None:
        # Two keepers may hold the same session; a session that is over holds no mount.
        if len(fds) == 2 and root not in found and not keeper.is_over(fds[0]):
            found[root] = (fds[0], fds[1])
            return
        for fd in fds:
            os.close(fd)

    async def prepare(self) -> None:
        """Start the keeper. Returns before it answers."""
        await trio.to_thread.run_sync(self._spare.prepare)

    async def keep(self, options: WorkerOptions, worker: OverlayWorker) -> None:
        """Have the session of ``worker`` held, in place of any earlier one of its root."""
        # Shielded: a worker that was started must get a holder, whatever is cancelled.
        with trio.CancelScope(shield=True):
            async with self._lock:
                self._told[options.root] = options, worker
                await self._keep(options, worker)

    async def _keep(self, options: WorkerOptions, worker: OverlayWorker) -> None:
        request: dict[str, object] = {
            "do": "keep",
            "root": options.root,
            "control": str(options.socket),
            "arguments": successor_arguments(options),
            "pid": worker.pid,
        }
        try:
            with _descriptors(worker) as fds:
                if fds and not await trio.to_thread.run_sync(self._tell, request, fds):
                    log.warning("session_not_kept", root=options.root)
        except OSError as error:  # out of descriptors
            log.warning("session_not_kept", root=options.root, error=str(error))
        self._begun.set()

    def _tell(self, request: dict[str, object], fds: Sequence[int]) -> bool:
        """Have our own keeper hold a session, and then no other."""
        self._spare.prepare()
        if not self._spare.tell(request, fds):
            return False
        self._tell_predecessors("drop", str(request["root"]))
        return True

    async def drop(self, root: str) -> None:
        """Have every keeper let go of a session that is given up or over.

        Its worker alone holds it from then on.
        """
        # Shielded: while any process holds the session, its mount hangs and cannot be detached as dead.
        with trio.CancelScope(shield=True):
            async with self._lock:
                self._told.pop(root, None)
                await trio.to_thread.run_sync(self._spare.tell, {"do": "drop", "root": root})
                await trio.to_thread.run_sync(self._tell_predecessors, "drop", root)

    async def end_predecessors(self) -> None:
        """End the keepers of earlier daemons, and with them sessions of roots that are not served any more."""
        async with self._lock:  # a thread of `keep` or `drop` may be asking them
            await trio.to_thread.run_sync(self._tell_predecessors, "end", "")
            for predecessor in self._predecessors:
                with suppress(OSError):  # it has ended
                    predecessor.kill_if_silent()
                predecessor.close()
            self._predecessors.clear()

    def _tell_predecessors(self, what: str, root: str) -> None:
        for predecessor in self._predecessors:
            try:
                predecessor.ask(what, root)
            except OSError as error:
                log.warning("keeper_lost", error=str(error))

    async def run(self) -> None:
        """Start another keeper whenever one has ended, and tell it of every session that goes on."""
        row = 0
        while True:
            await self._begun.wait()
            began = trio.current_time()
            await self._ended()
            row = 0 if trio.current_time() - began >= _STABLE_SECONDS else row
            log.warning("keeper_ended", in_a_row=row + 1)
            await trio.sleep(_AGAIN_SECONDS[min(row, len(_AGAIN_SECONDS) - 1)])
            row += 1
            for root in list(self._told):
                async with self._lock:
                    if root in self._told:  # it may have been dropped meanwhile
                        await self._keep(*self._told[root])

    async def _ended(self) -> None:
        """Wait for the end of the keeper; return at once where there is none."""
        while True:
            try:
                pidfd = self._spare.open_pidfd()
                break
            except OSError as error:  # out of descriptors
                log.warning("keeper_not_watched", error=str(error))
                await trio.sleep(_UNWATCHED_SECONDS)
        if pidfd is None:
            return
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)


@contextmanager
def _descriptors(worker: OverlayWorker) -> Iterator[list[int]]:
    """Yield duplicates of the descriptors that a keeper holds of ``worker``, none where it has no session."""
    # Duplicates, for a thread: the worker's own are closed at any time, when it has ended.
    fds: list[int] = []
    try:
        if worker.session_fd is not None and not worker.closed:
            fds.extend(os.dup(fd) for fd in (worker.session_fd, worker.backing_fd, worker.pidfd))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


class SessionStore:
    """Holders of sessions outside the daemon. Belongs to the trio thread."""

    def __init__(
        self, notifier: Notifier, stored: MutableMapping[str, int], keeper: SessionKeeper | None = None
    ) -> None:
        """Prepare to keep sessions.

        Args:
            notifier: connection to systemd.
            stored: descriptors that systemd gave back at the start, by name.
            keeper: client of the keeper process; None where systemd starts the daemon.
        """
        self._notifier = notifier
        # Sessions of predecessors that no worker of this daemon goes on with yet.
        self._stored = stored
        self._keeper = keeper
        self._are_rest_closed = False

    @property
    def holders(self) -> set[int]:
        """Processes that have sessions and backing directories open by design, so that they are no bypasses."""
        pid = self._keeper.pid if self._keeper is not None else None
        found = {_SERVICE_MANAGER} if self._notifier.active else set()
        return found | {pid} if pid is not None else found

    async def inherit(self, roots: Iterable[str], *, prepare: bool) -> None:
        """Take over the sessions that keepers of daemons before this one hold.

        Args:
            roots: paths of the configured roots.
            prepare: start this daemon's keeper as well.
        """
        if self._keeper is None:
            return
        # First, so that the new keeper imports what it needs while the others are asked.
        if prepare:
            await self._keeper.prepare()
        for root, (session_fd, backing_fd) in (await self._keeper.inherit(roots)).items():
            for kind, fd in zip(_KINDS, (session_fd, backing_fd), strict=True):
                if self._stored.setdefault(_name(kind, root), fd) != fd:
                    os.close(fd)  # a duplicate of what systemd has kept as well

    async def keep(self, options: WorkerOptions, worker: OverlayWorker) -> None:
        """Keep the session of ``worker``, in place of any earlier one of its root."""
        if worker.session_fd is None:
            await self._settle(options.root)
            return
        # First: systemd keeps several descriptors of one name, and would give the earlier session back as
        # well.
        self._unstore(options.root)
        self._notifier.store(_name("session", options.root), worker.session_fd)
        self._notifier.store(_name("backing", options.root), worker.backing_fd)
        if self._keeper is not None:
            await self._keeper.keep(options, worker)
        await self._settle(options.root)

    # Every holder must be told: a mount whose session is held and that no worker serves is not dead but
    # hangs.
    async def drop(self, root: str) -> None:
        """Release the session of a root that is unmounted or whose session is given up."""
        self._unstore(root)
        if self._keeper is not None:
            await self._keeper.drop(root)
        await self._settle(root)

    def _unstore(self, root: str) -> None:
        for kind in _KINDS:
            self._notifier.unstore(_name(kind, root))

    def held(self, root: str) -> tuple[int, int] | None:
        """Return the session and backing descriptor of a root that a predecessor left, or None.

        They stay ours, and open until `keep` or `drop` of the root.
        """
        session_fd = self._stored.get(_name("session", root))
        backing_fd = self._stored.get(_name("backing", root))
        # A successor needs both, and the kernel's connection.
        if session_fd is None or backing_fd is None or keeper.is_over(session_fd):
            return None
        return session_fd, backing_fd

    def hold(self, root: str, worker: OverlayWorker) -> None:
        """Hold the session of a worker that is going to be closed."""
        if worker.session_fd is not None:
            self._store(root, (os.dup(worker.session_fd), os.dup(worker.backing_fd)))

    async def ask_worker(self, root: str, control: Path) -> None:
        """Hold the session of the worker that listens on ``control``, unless it is held or the worker refuses."""
        if self.held(root) is None:
            # Not abandoned on cancellation: descriptors would stay open.
            fds = await trio.to_thread.run_sync(ask_session, control)
            if fds is not None:
                self._store(root, fds)

    def _store(self, root: str, fds: tuple[int, int]) -> None:
        self._close_stored(root)
        for kind, fd in zip(_KINDS, fds, strict=True):
            self._stored[_name(kind, root)] = fd

    async def close_rest(self, roots: Iterable[str]) -> None:
        """Close stored descriptors of other roots than these.

        The keepers of earlier daemons end when no session waits for a worker any more.
        """
        wanted = {_name(kind, root) for root in roots for kind in _KINDS}
        for name in list(self._stored):
            if name not in wanted:
                os.close(self._stored.pop(name))
        self._are_rest_closed = True
        await self._end_predecessors()

    async def _settle(self, root: str) -> None:
        """Close what a predecessor left of a session that is kept or given up."""
        self._close_stored(root)
        # Shielded: the caller has a worker that must become known.
        with trio.CancelScope(shield=True):
            await self._end_predecessors()

    def _close_stored(self, root: str) -> None:
        for kind in _KINDS:
            fd = self._stored.pop(_name(kind, root), None)
            if fd is not None:
                os.close(fd)

    async def _end_predecessors(self) -> None:
        # Until then a predecessor's keeper is the third holder of a session that has no worker.
        if self._keeper is not None and self._are_rest_closed and not self._stored:
            await self._keeper.end_predecessors()

    async def run(self) -> None:
        """Replace a keeper that ends, until cancelled. Return at once where there is no keeper."""
        if self._keeper is not None:
            await self._keeper.run()


def _name(kind: str, root: str) -> str:
    # A hash: a name in the descriptor store has 255 characters at most, and no colon (sd_notify(3)).
    return f"{kind}-{hashlib.blake2s(os.fsencode(root), digest_size=12).hexdigest()}"
