"""The two processes of the page: this one is the broker (`broker.py`), and starts the one that faces browsers (`front_process.py`).

Guarantees: a front that dies is started again; the sockets stay, so that browsers wait and are not refused. Actions that run when the
service is stopped are waited for.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from ciuic.cli.commands.web.access import Grants
from ciuic.cli.commands.web.broker import ActionLog, Broker
from ciuic.cli.commands.web.jobs import FrontJob
from ciuic.cli.commands.web.looks import Looks
from ciuic.errors import Busy, CiuicError, NotPermitted
from ciuic.protocol.http_server import serve_http
from ciuic.protocol.peer_socket import allow_descriptors
from ciuic.system.child_process import environment, module_command
from ciuic.system.unix_sockets import bind, listener_of

WEB_SOCKET: Final = "web.sock"
_BROKER_SOCKET: Final = "private/broker.sock"
_BACKLOG: Final = 512
_TCP_BACKLOG: Final = 128
_RESTART_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 5.0
_ACTIONS_SECONDS: Final = 80.0
log = structlog.get_logger(__name__)


def unix_listener(
    path: Path, mode: int, owner: tuple[int, int] | None = None, *, directory_mode: int = 0o755
) -> socket.socket:
    """Return a listener at a path of a directory of ours.

    Raises:
        Busy: another process listens there.
        CiuicError: the directory cannot be used.
    """
    try:
        path.parent.mkdir(mode=directory_mode, parents=True, exist_ok=True)
        if listener_of(os.fspath(path)) is not None:
            raise Busy(f"another ciuic web listens at {path}")
        listener = bind(os.fspath(path), socket.SOCK_STREAM)
        # Closing another user's descriptor may block (`peer_socket`).
        allow_descriptors(listener, allowed=False)
        path.chmod(mode)
        if owner is not None:
            os.chown(path, *owner)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise CiuicError(f"cannot listen at {path}: {error.strerror}") from error
    return listener


def tcp_listener(listen: str) -> socket.socket:
    """Return a listener at HOST:PORT.

    Raises:
        Busy: another process listens there.
        NotPermitted, CiuicError: it cannot be used.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        # Short: who floods it waits for retries of SYN like everybody, and no session stands behind thousands.
        listener.listen(_TCP_BACKLOG)
    except PermissionError as error:
        raise NotPermitted(
            f"cannot listen at {listen}: {error.strerror}", hint="use a port from 1024 on"
        ) from error
    except OSError as error:
        raise Busy(
            f"cannot listen at {listen}: {error.strerror}",
            hint="choose another `web.listen`, or give this one --listen",
        ) from error
    return listener


class Page:
    """The service.

    Args:
        directory: Runtime directory, made if missing.
        listen: Address and port beside the Unix socket; None for none.
        job: What the front shows; its sockets and the broker's are added.
        control: Path of the daemon's control socket.
        command: Words before those of an action.
        log: Log of actions.
        secrets: Variables of the environment that the front needs to open a remote.
    """

    def __init__(
        self,
        directory: Path,
        listen: str | None,
        job: FrontJob,
        *,
        control: Path,
        command: list[str],
        log: ActionLog,
        secrets: dict[str, str],
    ) -> None:
        self._control = control
        self._command = command
        self._log = log
        self._secrets = secrets
        self._is_unconfined = False
        self._grants = Grants(job.admission, job.proxy_uid)
        self._web_socket = unix_listener(directory / WEB_SOCKET, 0o666)
        # Both ends stay here: what a front that dies has not taken, the next one takes.
        self._channel, front_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Nothing is read from it: what is queued there would never be taken.
        self._channel.shutdown(socket.SHUT_RD)
        self._sockets = [front_end]
        # In a directory that the front can enter because it may read everything: other processes of its user cannot.
        self._broker_socket = unix_listener(
            directory / _BROKER_SOCKET, 0o600, job.run_as, directory_mode=0o700
        )
        if listen is not None:
            self._sockets.append(tcp_listener(listen))
        connections, *fds = (one.fileno() for one in self._sockets)
        self._job = msgspec.structs.replace(
            job, sockets=tuple(fds), connections=connections, broker=str(directory / _BROKER_SOCKET)
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            NotPermitted: the front cannot be confined; it serves nothing then.
        """
        ended = trio.Event()
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as acting, trio.open_nursery() as serving:
                broker = Broker(
                    self._control,
                    self._command,
                    may_act=self._job.may_act,
                    log=self._log,
                    looks=Looks(self._job, self._secrets),
                    grants=self._grants,
                    nursery=acting,
                )
                await serving.start(serve_http, broker, self._broker_socket, ended.wait)
                serving.start_soon(self._grants.hand_over, self._web_socket, self._channel)
                serving.start_soon(self._keep_front, serving.cancel_scope)
                async for _ in signals:
                    break
                serving.cancel_scope.cancel()
                acting.cancel_scope.deadline = trio.current_time() + _ACTIONS_SECONDS
        if self._is_unconfined:
            raise NotPermitted(
                "the process that faces browsers cannot be confined", hint="the line above says why"
            )

    async def _keep_front(self, serving: trio.CancelScope) -> None:
        """Run the front again and again, unless it cannot be confined, which ends the service."""
        while True:
            began = time.monotonic()
            process = await trio.lowlevel.open_process(
                module_command("ciuic.cli.commands.web.front_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(self._job.connections, *self._job.sockets),
                env={**environment(), **self._secrets},
                cwd="/",
            )
            assert process.stdin is not None
            try:
                await process.stdin.send_all(msgspec.json.encode(self._job) + b"\n")
                code = await process.wait()
            except trio.BrokenResourceError:
                code = await process.wait()
            finally:
                # Its end of input tells it to end.
                with trio.CancelScope(shield=True), trio.move_on_after(_STOP_SECONDS):
                    await process.stdin.aclose()
                    await process.wait()
                if process.returncode is None:
                    process.kill()
            if code == NotPermitted.exit_code:
                self._is_unconfined = True
                serving.cancel()
            log.warning("front_ended", code=code)
            await trio.sleep(max(0.0, _RESTART_SECONDS - (time.monotonic() - began)))
