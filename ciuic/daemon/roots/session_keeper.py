"""Client of the keeper process, which holds sessions where systemd does not (fuse_layer/prefork/keeper.py).

Guarantees: a session that `keep` has returned for outlives the daemon and the worker together; when the
keeper itself ends, another one is started and told of every session that is served then; sessions of a killed
daemon's keeper are handed to this daemon, and released by that keeper root by root, once this daemon's own
keeper has them. A failure costs the third holder of a session and nothing else, and is logged.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog
import trio

from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerOptions, successor_arguments
from ciuic.fuse_layer.prefork import keeper, messages
from ciuic.fuse_layer.prefork.client import SpareProcess

# Time limit for the answer of a predecessor's keeper: longer than the start of a worker, which may be in
# progress there.
_ANSWER_SECONDS: Final = keeper.START_SECONDS + 10.0
# Pauses before another keeper is started, by the number of keepers that ended in a row.
_AGAIN_SECONDS: Final = (0.0, 0.5, 2.0, 10.0, 30.0)
# Life of a keeper that ends the row.
_STABLE_SECONDS: Final = 60.0
# Pause before another attempt to watch a keeper where no descriptor was to be had.
_UNWATCHED_SECONDS: Final = 1.0
log = structlog.get_logger(__name__)


class _Predecessor:
    """Connection to a keeper that another daemon has started.

    Calls block, and raise OSError when it does not answer.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_SECONDS)
        try:
            self._socket.connect(str(path))
            # The keeper answers nobody while it starts a worker, so an answer says that none is being
            # started.
            self.ask("take", "")
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, root: str) -> list[int]:
        """Send one request, and return the descriptors that come with the answer."""
        self._socket.send(json.dumps({"do": what, "root": root}).encode())
        answer, fds = messages.receive(self._socket)
        if answer is None:
            raise ConnectionResetError("the keeper has ended")
        return fds

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
